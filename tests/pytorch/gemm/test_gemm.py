# gemm, the functional op: every layout, dtype and epilogue against float64, accumulation, empty extents, repeatability,
# compile and errors.
import math

import pytest
import torch
from support import (
    DTYPES,
    assert_same_bits,
    assert_within,
    in_threads,
    layouts,
    randn,
    refused,
    rounding,
    sum_error,
    wide,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch.functional import gemm, gemm_accumulate

from .cases import LAYOUTS, accumulated, call, each, first_rounding, may_refuse, operands, product

FORMS = ((torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32))


@pytest.fixture(autouse=True)
def no_tf32():
    """The bounds here are those of float32 products; TF32 has its own test."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype, out_dtype", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_product(layout, dtype, out_dtype, device):
    for sizes, a, b in each(layout, dtype, device):
        d, extra = gemm(a, b, layout, out_dtype=out_dtype)
        want, magnitude = product(a, b, layout)
        assert d.dtype == (out_dtype or dtype) and d.device == a.device and extra.numel() == 0
        assert_within(d, want, accumulated(magnitude, sizes[2]) + rounding(want, d.dtype), f"{layout} {sizes}")


@pytest.mark.parametrize("dtype, out_dtype", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias(layout, dtype, out_dtype, device):
    for sizes, a, b in each(layout, dtype, device):
        bias = randn(sizes[1], dtype=out_dtype or dtype, device=device, scale=5.0)
        d, extra = gemm(a, b, layout, epilogue="bias", bias=bias, out_dtype=out_dtype)
        want, magnitude = product(a, b, layout)
        first = first_rounding(want, d.dtype, device)
        want, magnitude = want + wide(bias), magnitude + wide(bias).abs()
        assert d.dtype == (out_dtype or dtype) and extra.numel() == 0
        bound = accumulated(magnitude, sizes[2], 1) + first + rounding(want, d.dtype)
        assert_within(d, want, bound, f"{layout} {sizes}")


def column_sums(b):
    sums = wide(b).sum(0)
    return sums, sum_error(wide(b).abs().sum(0), 2 * b.shape[0]) + rounding(sums, b.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient(dtype, device):
    for sizes, a, b in each("NT", dtype, device):
        results = call(a, b, "NT", "bgrad", sizes)
        if results is None:
            continue
        d, sums = results
        want, magnitude = product(a, b, "NT")
        assert_within(d, want, accumulated(magnitude, sizes[2]) + rounding(want, dtype), f"{sizes}")
        assert sums.dtype == dtype
        assert_within(sums, *column_sums(b), f"{sizes} bias gradient")


@pytest.mark.parametrize("bias_grad", [False, True])
@pytest.mark.parametrize("dtype, out_dtype", FORMS)
def test_accumulate_adds(dtype, out_dtype, bias_grad, device):
    for sizes, a, b in each("NT", dtype, device):
        out = randn(*sizes[:2], dtype=out_dtype or dtype, device=device, scale=3.0)
        before, version, address = wide(out), out._version, out.data_ptr()
        try:
            sums = gemm_accumulate(a, b, "NT", out, bias_grad=bias_grad)
        except NotImplementedError:
            if not (bias_grad and may_refuse("bgrad", *sizes, device)):
                raise
            assert_within(out, before, 0.0, "a refused call wrote")
            continue
        want, magnitude = product(a, b, "NT")
        bound = accumulated(magnitude + before.abs(), sizes[2], 2) + rounding(want + before, out.dtype)
        if device == "cpu":  # LibTorch's product, rounded, then an add
            bound = bound + rounding(want, out.dtype)
        bound = bound + first_rounding(want, out.dtype, device)
        assert_within(out, want + before, bound, f"{sizes}")
        assert out.data_ptr() == address and out._version > version
        if bias_grad:
            assert_within(sums, *column_sums(b), f"{sizes} bias gradient")
        else:
            assert sums.numel() == 0


@pytest.mark.parametrize("dtype, out_dtype", FORMS)
def test_overwriting_reads_nothing(dtype, out_dtype, device):
    for sizes, a, b in each("NT", dtype, device):
        out = torch.full(sizes[:2], torch.nan, dtype=out_dtype or dtype, device=device)
        gemm_accumulate(a, b, "NT", out, overwrite=True)
        assert_same_bits(out, gemm(a, b, "NT", out_dtype=out_dtype)[0], f"{sizes}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulate_in_every_layout(layout, device):
    a, b = operands(layout, 16, 24, 32, torch.bfloat16, device)
    out = torch.ones(16, 24, device=device)
    gemm_accumulate(a, b, layout, out)
    gemm_accumulate(a, b, layout, out)
    want, magnitude = product(a, b, layout)
    assert_within(out, 1 + 2 * want, 2 * accumulated(magnitude + 1, 32, 2) + 2 * rounding(1 + 2 * want, out.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_extents(layout, dtype, device):
    for sizes in ((0, 8, 16), (8, 0, 16), (8, 16, 0), (0, 0, 0)):
        a, b = operands(layout, *sizes, dtype, device)
        zeros = torch.zeros(sizes[:2], dtype=dtype, device=device)
        assert_same_bits(gemm(a, b, layout)[0], zeros, f"{sizes}")
        bias = randn(sizes[1], dtype=dtype, device=device)
        assert_same_bits(gemm(a, b, layout, epilogue="bias", bias=bias)[0], zeros + bias, f"{sizes} bias")
        out = randn(*sizes[:2], device=device)
        before = out.clone()
        gemm_accumulate(a, b, layout, out)
        assert_same_bits(out, before, f"{sizes} accumulate")
        if layout == "NT":
            out_too = before.clone()
            sums = gemm_accumulate(a, b, layout, out_too, bias_grad=True)
            assert_same_bits(out_too, before, f"{sizes} accumulate")
            assert_within(sums, *column_sums(b), f"{sizes} bias gradient")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout, device):
    """Values, not bits: an algorithm may depend on the operands' alignment."""
    sizes = (16, 24, 40)
    a, b = operands(layout, *sizes, torch.bfloat16, device)
    want, magnitude = product(a, b, layout)
    bound = accumulated(magnitude, sizes[2]) + rounding(want, torch.bfloat16)
    for (name, other_a), (_, other_b) in zip(layouts(a), layouts(b), strict=True):
        assert_within(gemm(other_a, b, layout)[0], want, bound, f"a {name}")
        assert_within(gemm(a, other_b, layout)[0], want, bound, f"b {name}")
    one = torch.ones((), dtype=torch.bfloat16, device=device)
    spread = one.expand_as(b)  # stride 0, as .sum().backward() makes it
    want, magnitude = product(a, spread, layout)
    assert_within(gemm(a, spread, layout)[0], want, accumulated(magnitude, sizes[2]) + rounding(want, torch.bfloat16))


def test_leading_dimensions_fold(device):
    a, b = operands("TN", 24, 16, 32, torch.float32, device)
    assert_same_bits(gemm(a, b.view(2, 3, 4, 32), "TN")[0], gemm(a, b, "TN")[0])
    a, b = operands("NT", 16, 24, 32, torch.float32, device)
    assert_same_bits(gemm(a.view(4, 8, 24), b.view(4, 8, 16), "NT")[0], gemm(a, b, "NT")[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_and_threads_repeat_their_bits(dtype, device):
    for layout in LAYOUTS:
        a, b = operands(layout, 96, 136, 1000, dtype, device)
        d = gemm(a, b, layout)[0]
        for other in [gemm(a, b, layout)[0], gemm(a.clone(), b.clone(), layout)[0]]:
            assert_same_bits(other, d, layout)
        for other in in_threads(4, lambda _, a=a, b=b, layout=layout: gemm(a, b, layout)[0]):
            assert_same_bits(other, d, layout)


def test_nan_and_infinity_spread(device):
    a, b = operands("TN", 8, 16, 24, torch.float32, device)
    b[2, 3], b[5, 0] = math.nan, math.inf
    d = gemm(a, b, "TN")[0]
    assert d[2].isnan().all() and d[5].isinf().all()
    assert d[[0, 1, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.gpu
def test_tf32_follows_torchs_setting():
    a, b = operands("TN", 64, 64, 256, torch.float32, "cuda")
    exact = gemm(a, b, "TN")[0]
    torch.backends.cuda.matmul.allow_tf32 = True
    cut = gemm(a, b, "TN")[0]
    want, magnitude = product(a, b, "TN")
    assert not torch.equal(cut, exact)
    # both operands cut to 11 bits, by truncation or rounding: 2 * 2^-10 a product
    assert_within(cut, want, magnitude * 2.0**-9 * (1 + 2.0**-9) + accumulated(magnitude, 256))


# ---- PyTorch around it ----


def test_opcheck(device):
    a, b = operands("NT", 8, 16, 24, torch.float32, device)
    bias, aux = randn(16, device=device), randn(8, 16, device=device)
    op, accumulate = torch.ops.te.gemm.default, torch.ops.te.gemm_accumulate.default
    torch.library.opcheck(op, (a, b, "NT", "none", None, None, None))
    torch.library.opcheck(op, (a, b, "NT", "gelu", bias, None, None))
    torch.library.opcheck(op, (a, b, "NT", "dgelu", None, aux, None))
    torch.library.opcheck(op, (a.bfloat16(), b.bfloat16(), "NT", "bgrad", None, None, torch.float32))
    for flags in ((False, False), (True, False), (False, True)):
        torch.library.opcheck(accumulate, (a, b, "NT", randn(8, 16, device=device), *flags))


def test_compiled_bits_equal_eager(device):
    def both(a, b, bias, out):
        d, aux = gemm(a, b, "TN", epilogue="gelu", bias=bias)
        gemm_accumulate(a, b, "TN", out)
        return d, aux

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes, stance in (((8, 16, 24), "default"), ((16, 24, 40), "fail_on_recompile")):
        a, b = operands("TN", *sizes, torch.float32, device)
        bias, out = randn(sizes[1], device=device), randn(*sizes[:2], device=device)
        out_too = out.clone()
        with torch.compiler.set_stance(stance):
            got = compiled(a, b, bias, out_too)
        for x, y in zip((*got, out_too), (*both(a, b, bias, out), out), strict=True):
            assert_same_bits(x, y)


def test_fake_and_meta_tensors_get_shapes():
    a, b = torch.empty(6, 4, device="meta"), torch.empty(2, 3, 4, device="meta")
    assert gemm(a, b, "TN")[0].shape == (6, 6)
    with FakeTensorMode():
        a, b, out = torch.empty(8, 4, dtype=torch.bfloat16), torch.empty(8, 3, dtype=torch.bfloat16), torch.empty(3, 4)
        d, sums = gemm(a, b, "NT", epilogue="bgrad", out_dtype=torch.float32)
        assert (d.shape, d.dtype, sums.shape, sums.dtype) == ((3, 4), torch.float32, (3,), torch.bfloat16)
        assert gemm_accumulate(a, b, "NT", out, bias_grad=True).shape == (3,)


def test_it_stands_outside_autograd(device):
    a, b = operands("TN", 8, 16, 24, torch.float32, device)
    out = torch.zeros(8, 16, device=device)
    d = gemm(a.requires_grad_(), b, "TN")[0]
    gemm_accumulate(a, b, "TN", out)
    assert not d.requires_grad and not out.requires_grad


# ---- errors ----


def bad_calls(device):
    def t(*shape, dtype=torch.bfloat16):
        return torch.ones(*shape, dtype=dtype, device=device)

    a, b, bias, aux = t(6, 4), t(3, 4), t(6), t(3, 6)  # TN: d [3, 6]
    x, dy, out = t(3, 4), t(3, 6), t(6, 4, dtype=torch.float32)  # NT: d [6, 4]
    half = torch.float16
    return (
        (lambda: gemm(a, t(3, 5)), ("'b'", "[3, 5]", "[6, 4]", "TN")),
        (lambda: gemm(a, b, "TT"), ("'layout'", "'TT'", "TN, NN or NT")),
        (lambda: gemm(a, b, epilogue="relu"), ("'epilogue'", "'relu'", "bgrad")),
        (lambda: gemm(a, b, epilogue="bgrad"), ("'epilogue'", "bgrad", "NT")),
        (lambda: gemm(a, b, epilogue="bias"), ("'bias'", "wanted a tensor", "'bias'")),
        (lambda: gemm(a, b, bias=bias), ("'bias'", "'none'")),
        (lambda: gemm(a, b, epilogue="bias", bias=t(1)), ("'bias'", "[1]", "[6]")),
        (lambda: gemm(a, b, epilogue="bias", bias=bias.to(half)), ("'bias'", "Half", "BFloat16")),
        (lambda: gemm(a, b, epilogue="dgelu"), ("'aux'", "missing", "dgelu")),
        (lambda: gemm(a, b, aux=aux), ("'aux'", "given", "'none'")),
        (lambda: gemm(a, b, epilogue="dgelu", aux=t(1, 6)), ("'aux'", "[1, 6]", "[3, 6]")),
        (lambda: gemm(a, b, epilogue="dgelu", aux=aux.to(half)), ("'aux'", "Half", "BFloat16")),
        (lambda: gemm(a, b, out_dtype=half), ("'out_dtype'", "Half", "Float", "BFloat16")),
        (lambda: gemm(a.int(), b.int()), ("'a'", "Int", "float32, float16 or bfloat16")),
        (lambda: gemm(a.double(), b.double()), ("'a'", "Double", "float32, float16 or bfloat16")),
        (lambda: gemm(a, b.float()), ("'b'", "Float", "BFloat16")),
        (lambda: gemm(a, b.to("meta")), ("'b'", "meta", device)),
        (lambda: gemm(a, t(3)[0]), ("'b'", "dimensions")),
        (lambda: gemm_accumulate(x, dy, "NT", out.T), ("'out'", "[4, 6]", "[6, 4]")),
        (lambda: gemm_accumulate(x, dy, "NT", t(4, 6, dtype=torch.float32).T), ("'out'", "not contiguous")),
        (lambda: gemm_accumulate(x, dy, "NT", out.to(half)), ("'out'", "Half", "Float or BFloat16")),
        (lambda: gemm_accumulate(x, dy, "NT", out.to("meta")), ("'out'", "meta", device)),
        (lambda: gemm_accumulate(a, b, "TN", t(3, 6), bias_grad=True), ("'bias_grad'", "NT")),
    )


def test_bad_input_is_named_and_harmless(device):
    a, b = operands("TN", 8, 16, 24, torch.float32, device)
    before = gemm(a, b, "TN")[0]
    for bad, words in bad_calls(device):
        with refused(ValueError, "gemm", *words):
            bad()
    assert_same_bits(gemm(a, b, "TN")[0], before)


@pytest.mark.gpu
def test_tensor_on_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = operands("TN", 16, 24, 32, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        d = gemm(a, b, "TN")[0]
    assert d.device == a.device
    assert_same_bits(d.to("cuda:0"), gemm(a.to("cuda:0"), b.to("cuda:0"), "TN")[0])
