# cpp_extensions.general_gemm, the product by the name that frameworks use: plain tensors against float64, outputs in
# place, bias and its gradient, factors, gelu and its derivative, refusals.
import inspect

import pytest
import torch
from support import UNIT_ROUNDOFF, assert_same_bits, assert_within, randn, refused, rounding, sum_error, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm

LAYOUTS = ("TN", "NN", "NT")


@pytest.fixture(autouse=True)
def no_tf32():
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def operands(layout, device, dtype=torch.float32):
    """Weight [24, 16], input [5, 3, 16], output gradient [5, 3, 24], as the layout's A and B."""
    w, x, dy = (randn(*shape, dtype=dtype, device=device) for shape in ((24, 16), (5, 3, 16), (5, 3, 24)))
    return {"TN": (w, x), "NN": (w, dy), "NT": (x, dy)}[layout]


def oracle(a, b, layout):
    """(product, sum of magnitudes, depth), out of 2-D operands, in float64."""
    a, b = wide(a).flatten(0, -2), wide(b).flatten(0, -2)
    left, right = b.T if layout == "NT" else b, a.T if layout == "TN" else a
    return left @ right, left.abs() @ right.abs(), left.shape[1]


def bound(want, magnitude, depth, dtype):
    """Sums in float32 (tensor cores truncate: 2u a term), one rounding; a 16-bit product may be rounded before an
    addend, so two."""
    return sum_error(magnitude, 2 * depth + 2) + 2 * rounding(magnitude, dtype) * (1 + UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products(layout, dtype, device):
    a, b = operands(layout, device, dtype)
    for out_dtype in (None, torch.float32):
        d, bias_grad, gelu_in, extra = general_gemm(a, b, out_dtype, layout=layout)
        want, magnitude, depth = oracle(a, b, layout)
        assert d.dtype == (out_dtype or dtype) and bias_grad is gelu_in is extra is None
        assert d.shape == (want.shape if layout == "NT" else (5, 3, want.shape[1]))
        assert_within(d.flatten(0, -2), want, bound(want, magnitude, depth, d.dtype), layout)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_written_or_added_to(layout, accumulate, with_bias, device):
    a, b = operands(layout, device)
    want, magnitude, depth = oracle(a, b, layout)
    before = randn(*want.shape, device=device)
    bias = randn(want.shape[1], device=device) if with_bias else None
    out = before.clone() if accumulate else torch.full_like(before, torch.nan)
    d, *_ = general_gemm(a, b, layout=layout, out=out, accumulate=accumulate, bias=bias)
    assert d is out
    for addend in ([before] if accumulate else []) + ([bias] if with_bias else []):
        want, magnitude = want + wide(addend), magnitude + wide(addend).abs()
    assert_within(out, want, bound(want, magnitude, depth, out.dtype), layout)


def test_bias_and_its_gradient(device):
    w, x = operands("TN", device)
    bias = randn(24, device=device)
    d, *_ = general_gemm(w, x, bias=bias)
    want, magnitude, depth = oracle(w, x, "TN")
    want, magnitude = want + wide(bias), magnitude + wide(bias).abs()
    assert_within(d.flatten(0, -2), want, bound(want, magnitude, depth, d.dtype))
    x, dy = operands("NT", device)
    main_grad = torch.zeros(24, 16, device=device)
    dw, db, *_ = general_gemm(x, dy, layout="NT", grad=True, bias=bias, out=main_grad, accumulate=True)
    rows = wide(dy).flatten(0, -2)
    assert dw is main_grad and db.dtype == bias.dtype
    assert_within(db, rows.sum(0), sum_error(rows.abs().sum(0), 2 * len(rows)))


def test_a_quantizer_takes_the_result(device):
    a, b = operands("TN", device)
    want, *_ = general_gemm(a, b)
    d, *_ = general_gemm(a, b, quantization_params=lambda t: t * 2)
    assert_same_bits(d, want * 2)


E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def quantizers(kind, device):
    """Of a weight, an input, an output gradient."""
    if kind == "block":
        return [te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=n) for n in (2, 1, 1)]
    return [te.Float8CurrentScalingQuantizer(dtype, device) for dtype in (E4M3, E4M3, E5M2)]


@pytest.mark.parametrize("kind", ["current", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_operands(layout, kind, device):
    """The FP8 product of the bytes that a direction holds; in blocks the two directions of x and dy differ."""
    of_w, of_x, of_dy = quantizers(kind, device)
    chosen = {"TN": (of_w, of_x), "NN": (of_w, of_dy), "NT": (of_x, of_dy)}[layout]
    A, B = (q(t) for q, t in zip(chosen, operands(layout, device, torch.bfloat16), strict=True))
    a, b = A._native(), B._native()
    for split in (False, True):
        d, bias_grad, *_ = general_gemm(A, B, torch.float32, layout=layout, use_split_accumulator=split)
        fast = kind == "current" and not split
        want = _C.gemm_fp8(a, layout != "TN", b, layout == "NT", torch.float32, None, fast)
        assert_same_bits(d.flatten(0, -2), want)
        assert bias_grad is None and d.shape[:-1] == (B.shape[:-1] if layout != "NT" else want.shape[:1])
        out = torch.ones_like(want)
        assert general_gemm(A, B, layout=layout, out=out, accumulate=True, use_split_accumulator=split)[0] is out
        assert_within(out, wide(want) + 1, 2 * rounding(wide(want).abs() + 1, torch.float32))
    bias = randn(want.shape[1] if layout != "NT" else want.shape[0], device=device)
    if layout == "NT":
        _, bias_grad, *_ = general_gemm(A, B, layout=layout, grad=True, bias=bias)
        rows = wide(B.dequantize(dtype=torch.float32)).flatten(0, -2)
        assert_within(bias_grad, rows.sum(0), sum_error(rows.abs().sum(0), 2 * len(rows)))
    else:
        d, *_ = general_gemm(A, B, torch.float32, layout=layout, bias=bias, use_split_accumulator=True)
        assert_within(d.flatten(0, -2), wide(want) + wide(bias), rounding(wide(want) + wide(bias), torch.float32))
        quantized, *_ = general_gemm(A, B, torch.bfloat16, of_x, layout=layout)
        assert type(quantized) is type(of_x(randn(4, 4, device=device)))


# ---- factors and gelu: everything in float32 after the product, rounded once ----


def formed(A, B, layout, quantized):
    """The product in float32 of what the operands hold; quantized ones give the float32 product to the bit."""
    d = general_gemm(A, B, torch.float32, layout=layout, use_split_accumulator=True)[0] if quantized else None
    return oracle(A, B, layout) if d is None else (wide(d).flatten(0, -2), wide(d).flatten(0, -2).abs(), 0)


def operands_of(kind, layout, device, dtype):
    """Plain ones, or quantized."""
    plain = operands(layout, device, dtype)
    if kind == "plain":
        return plain
    chosen = dict(zip(("w", "x", "dy"), quantizers(kind, device), strict=True))
    names = {"TN": ("w", "x"), "NN": ("w", "dy"), "NT": ("x", "dy")}[layout]
    return tuple(chosen[name](t) for name, t in zip(names, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "current", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors(layout, kind, dtype, device):
    """alpha A B + bias + beta out."""
    A, B = operands_of(kind, layout, device, dtype)
    product, magnitude, depth = formed(A, B, layout, kind != "plain")
    bias = randn(product.shape[1], dtype=dtype, device=device)
    for alpha, beta, with_bias, accumulate in (
        (0.5, None, False, False),
        (-3.0, None, True, False),
        (1.0, -0.25, False, True),
        (2.0, None, True, True),
        (3.0, 0.0, False, True),
        (1, 0, False, True),
        (None, 0.0, True, False),
    ):
        before = randn(*product.shape, dtype=dtype, device=device)
        out = before.clone() if beta != 0.0 else torch.full_like(before, torch.nan)
        options = {"alpha": alpha, "beta": beta, "accumulate": accumulate, "bias": bias if with_bias else None}
        options |= {"layout": layout, "use_split_accumulator": True}
        got, *_ = general_gemm(A, B, out=out if accumulate else None, out_dtype=dtype, **options)
        assert (got is out) == accumulate and got.dtype == dtype
        factor = 1.0 if alpha is None else alpha
        kept = (1.0 if beta is None else beta) if accumulate else 0.0
        want, size = factor * product, abs(factor) * magnitude
        for addend in (wide(bias) * with_bias, wide(before) * kept):
            want, size = want + addend, size + addend.abs()
        roundings = 4 * UNIT_ROUNDOFF[torch.float32] * size + rounding(size, dtype)
        assert_within(got.flatten(0, -2), want, bound(want, size, depth, dtype) + roundings, f"{alpha} {beta}")


@pytest.mark.parametrize("kind", ["plain", "current", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_and_its_derivative(kind, dtype, device):
    """gelu(2 A B + bias), beside what it was of; B A times gelu' of that. The tanh form; |gelu'| <= 1.13."""
    A, B = operands_of(kind, "TN", device, dtype)
    product, magnitude, depth = formed(A, B, "TN", kind != "plain")
    bias, out = randn(24, dtype=dtype, device=device), torch.full((15, 24), torch.nan, dtype=dtype, device=device)
    options = {"gelu": True, "alpha": 2.0, "bias": bias, "use_split_accumulator": True}
    got, _, before, extra = general_gemm(A, B, out_dtype=dtype, **options)
    again, *_ = general_gemm(A, B, out=out, **options)
    assert again is out and extra is None and got.shape == before.shape == (5, 3, 24)
    assert_same_bits(out, got.flatten(0, -2))
    x, size = 2 * product + wide(bias), 2 * magnitude + wide(bias).abs()
    error = bound(x, size, depth, dtype) + rounding(size, dtype)
    assert_within(before.flatten(0, -2), x, error)
    # torch's own gelu: its tanh is good to 2^-21
    assert_within(got.flatten(0, -2), torch.nn.functional.gelu(x, approximate="tanh"), 1.13 * error + 2**-20 * size)
    w, dy = operands_of(kind, "NN", device, dtype)
    product, magnitude, depth = formed(w, dy, "NN", kind != "plain")
    gelu_in = randn(5, 3, 16, dtype=dtype, device=device)
    options = {"layout": "NN", "grad": True, "gelu": True, "gelu_in": gelu_in, "use_split_accumulator": True}
    got, bias_grad, same, _ = general_gemm(w, dy, out_dtype=dtype, **options)
    assert bias_grad is None and same is gelu_in and got.shape == gelu_in.shape
    slope = torch.ops.aten.gelu_backward(torch.ones_like(product), wide(gelu_in).flatten(0, -2), approximate="tanh")
    error = 1.13 * bound(product, magnitude, depth, dtype) + 2**-19 * magnitude + rounding(magnitude, dtype)
    assert_within(got.flatten(0, -2), product * slope, error)


# ---- flags: frameworks fill those that they do not use with None ----


def flags_of(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is False]


def products_of(function, layout, kind, device, options):
    """All that one function gives for the same operands, out among it: tensors, None and lists of them."""
    torch.manual_seed(0)
    A, B = operands_of(kind, layout, device, torch.bfloat16)
    shape = general_gemm(A, B, torch.float32, layout=layout)[0].flatten(0, -2).shape
    out = torch.ones(shape, dtype=torch.float32, device=device)
    if function is general_gemm:
        return list(function(A, B, torch.float32, layout=layout, out=out, **options))
    return [list(part) for part in function([A], [B], [out], None, torch.float32, layout=layout, **options)]


def same(got, want):
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    return got is want if want is None else torch.equal(got, want)


@pytest.mark.parametrize("function", [general_gemm, general_grouped_gemm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["plain", "current", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flag_of_none_is_false(layout, kind, function, device):
    """Each flag alone beside every other that is True, and all of them at once: as a router's gate is differentiated,
    with gelu None and grad True."""
    flags = flags_of(function)
    assert {"gelu", "grad", "accumulate", "use_split_accumulator"} <= set(flags)
    others = [{}, {"accumulate": True}, {"grad": True}, {"use_split_accumulator": True}]
    for beside in others:
        want = products_of(function, layout, kind, device, beside)
        for names in (*([name] for name in flags), flags):
            got = products_of(function, layout, kind, device, dict.fromkeys(names) | beside)
            assert same(got, want), (names, beside)


class Packed:
    """Stands for a quantized tensor."""

    dtype = torch.float32

    def _native(self):
        raise AssertionError("a refused call read its operand")


def test_refused_by_name(device):
    a, b = operands("TN", device)
    bias = randn(24, device=device)
    with refused(ValueError, "general_gemm", "'layout'", "TT"):
        general_gemm(a, b, layout="TT")
    with refused(ValueError, "general_gemm", "'A' alone is quantized"):
        general_gemm(Packed(), b)
    with refused(ValueError, "general_gemm", "'B' alone is quantized"):
        general_gemm(a, Packed())
    with refused(ValueError, "general_gemm", "'accumulate'", "'out'"):
        general_gemm(a, b, accumulate=True)
    with refused(ValueError, "general_gemm", "'bias'", "NT"):
        general_gemm(a, b, grad=True, bias=bias)
    for options, words in (
        ({"gelu": True, "accumulate": True, "out": torch.zeros(15, 24, device=device)}, ("'gelu'", "'accumulate'")),
        ({"gelu_in": b}, ("'gelu_in' is given", "None")),
        ({"gelu": True, "gelu_in": b}, ("'gelu_in' is given", "grad")),
        ({"gelu": True, "grad": True}, ("'gelu_in' is missing",)),
        ({"gelu": True, "grad": True, "gelu_in": bias}, ("'gelu_in'", "(24,)", "(15, 24)")),
        ({"alpha": "2"}, ("'alpha'", "'2'", "a number")),
        ({"alpha": torch.ones(1)}, ("'alpha'", "tensor", "a number")),
        ({"beta": 0.5}, ("'beta'", "0.5", "accumulate=True")),
    ):
        with refused(ValueError, "general_gemm", *words):
            general_gemm(a, b, **options)
    for name, value in (("ub", object()), ("ub_type", 0), ("extra_output", a), ("bulk_overlap", True)):
        with refused(NotImplementedError, "general_gemm", f"'{name}'", "overlap of tensor-parallel communication"):
            general_gemm(a, b, **{name: value})
