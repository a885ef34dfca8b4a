# gemm with a GELU after it, and the gradient of one, compared with float64.
import math

import pytest
import torch
from support import DTYPES, U32, assert_within, randn, rounding, wide

from .cases import LAYOUTS, accumulated, call, each, first_rounding, product


@pytest.fixture(autouse=True)
def no_tf32():
    """The bounds here are those of float32 products; TF32 has its own test."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def gelu64(x):
    """(value, slope) of the tanh form."""
    x = x.clone().requires_grad_()
    y = torch.nn.functional.gelu(x, approximate="tanh")
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


# gelu and its slope are made of t = tanh(.) within 4u of itself, or on CUDA, where the fast instruction may be used,
# within 2^-11 (the PTX ISA's bound for tanh.approx). value = x/2 (1 + t); slope = (1 + t)/2 + x/2 (1 - t^2) du.
def tanh_error(device):
    return 2.0**-11 if device == "cuda" else 4 * U32


def gelu_value_error(x, device):
    return x.abs() * (tanh_error(device) / 2 + 4 * U32)


def gelu_slope_error(x, device):
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return (tanh_error(device) + 8 * U32) * (1 + x.abs() * du)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu(layout, dtype, with_bias, device):
    for sizes, a, b in each(layout, dtype, device):
        a.div_(math.sqrt(sizes[2]))
        bias = randn(sizes[1], dtype=dtype, device=device) if with_bias else None
        results = call(a, b, layout, "gelu", sizes, bias=bias)
        if results is None:
            continue
        d, aux = results
        pre, magnitude = product(a, b, layout)
        first = first_rounding(pre, dtype, device)
        if with_bias:
            pre, magnitude = pre + wide(bias), magnitude + wide(bias).abs()
        error = accumulated(magnitude, sizes[2], 1) + first
        assert_within(aux, pre, error + rounding(pre, dtype), f"{layout} {sizes} aux")
        error = error + first_rounding(pre, dtype, device)  # gelu may be taken of what aux holds
        want, slope = gelu64(pre)
        steepest = slope.abs() + error  # |gelu''| < 1
        bound = error * steepest + gelu_value_error(pre, device)
        assert_within(d, want, bound * (1 + 2**-7) + rounding(want, dtype), f"{layout} {sizes}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dgelu(layout, dtype, device):
    for sizes, a, b in each(layout, dtype, device):
        aux = randn(*sizes[:2], dtype=dtype, device=device, scale=2.0)
        results = call(a, b, layout, "dgelu", sizes, aux=aux)
        if results is None:
            continue
        d, extra = results
        assert extra.numel() == 0
        grad, magnitude = product(a, b, layout)
        slope = gelu64(wide(aux))[1]
        slope_error = gelu_slope_error(wide(aux), device)
        error = accumulated(magnitude, sizes[2]) + first_rounding(grad, dtype, device)
        bound = error * (slope.abs() + slope_error) + grad.abs() * slope_error
        assert_within(d, grad * slope, bound * (1 + 2**-7) + rounding(grad * slope, dtype), f"{layout} {sizes}")
