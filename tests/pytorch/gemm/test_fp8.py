# gemm_fp8, the products of FP8 matrices: every pair of formats and scalings, bias, accumulation, output dtype and odd
# shape against float64, exactly where the operands are whole numbers; repeatability, compile, refusals.
import pytest
import torch
from support import U32, assert_same_bits, assert_within, fp8_sum_error, randn, refused, rounding, wide
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch import _C

from .fp8_operands import BLOCK_1D, BLOCK_2D, NAMES, TENSOR, TORCH_DTYPES, Operand, over_elements

gemm_fp8, gemm_fp8_accumulate = torch.ops.te.gemm_fp8, torch.ops.te.gemm_fp8_accumulate

SCALINGS = [(TENSOR, TENSOR), (BLOCK_1D, BLOCK_1D), (BLOCK_1D, BLOCK_2D), (BLOCK_2D, BLOCK_1D)]
FORMATS = [(False, False), (False, True), (True, False)]  # e5m2 of a, of b
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# outer extent of a (columns of d), of b (rows of d), depth
SHAPES = [(1, 1, 1), (16, 16, 16), (3, 17, 130), (130, 1, 300), (300, 257, 17), (64, 48, 512), (17, 300, 129)]
scalings = pytest.mark.parametrize("scaling", SCALINGS, ids=lambda pair: "x".join(NAMES[s] for s in pair))
formats = pytest.mark.parametrize("formats", FORMATS, ids=["e4m3", "e4m3-e5m2", "e5m2-e4m3"])


def operands(shape, scaling, formats, device, **options):
    a_outer, b_outer, depth = shape
    a = Operand(a_outer, depth, scaling[0], formats[0], device, **options)
    return a, Operand(b_outer, depth, scaling[1], formats[1], device, **options)


def product(a, b):
    """(d, sum of the products' magnitudes) in float64."""
    return b.value @ a.value.T, b.value.abs() @ a.value.abs().T


def fast_choices(scaling):
    return [False, True] if scaling[0] == TENSOR else [False]


# A whole number's products are below 2^2, sums of 512 of them below 2^11, scales powers of two from 2^-2 to 2^2: exact
# in the tensor cores' accumulators (14 bits) and in float32 whatever the order, so that d is the exact value rounded
# once. A bias of whole numbers below 8 changes nothing in that.


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@formats
@scalings
def test_whole_numbers_are_exact(scaling, formats, out_dtype, device):
    for shape in SHAPES:
        for fast in fast_choices(scaling):
            for in_padded in (True, False):
                a, b = operands(shape, scaling, formats, device, in_padded=in_padded)
                d = gemm_fp8(*a.arguments, *b.arguments, out_dtype, None, fast)
                assert d.device == a.data.device and d.is_contiguous()
                assert_same_bits(d, product(a, b)[0].to(out_dtype) + 0.0, f"{shape} fast={fast}")


@pytest.mark.parametrize("bias_dtype", OUT_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@scalings
def test_bias(scaling, out_dtype, bias_dtype, device):
    for shape in SHAPES:
        a, b = operands(shape, scaling, FORMATS[0], device)
        bias = torch.randint(-8, 9, (shape[0],)).to(bias_dtype)
        d = gemm_fp8(*a.arguments, *b.arguments, out_dtype, bias.to(device), False)
        want = product(a, b)[0]
        want = want + bias.double()
        # cuBLASLt may round the product to a 16-bit d's dtype before the bias is added.
        first = rounding(want - bias.double(), out_dtype) if device == "cuda" and out_dtype != torch.float32 else 0.0
        assert d.dtype == out_dtype
        assert_within(d, want, first + rounding(want, out_dtype), f"{shape}")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@formats
@scalings
def test_accumulate(scaling, formats, out_dtype, overwrite, device):
    for shape in SHAPES:
        a, b = operands(shape, scaling, formats, device)
        before = torch.randint(-8, 9, (shape[1], shape[0])).double()
        out = before.to(out_dtype).to(device)
        version = out._version
        if overwrite:
            out.fill_(torch.nan)
        assert gemm_fp8_accumulate(*a.arguments, *b.arguments, out, overwrite, False) is None
        assert out._version > version
        want = product(a, b)[0]
        first = 0.0 if overwrite or out_dtype == torch.float32 else rounding(want, out_dtype)
        want = want if overwrite else want + before
        assert_within(out, want, first + rounding(want, out_dtype) if out_dtype != torch.float32 else 0.0, f"{shape}")


# Values that are not whole.
@formats
@scalings
def test_normal_values_stay_in_bounds(scaling, formats, device):
    for shape in SHAPES:
        for fast in fast_choices(scaling):
            a, b = operands(shape, scaling, formats, device, whole=False)
            d = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, fast)
            want, magnitude = product(a, b)
            assert_within(d, want, fp8_sum_error(magnitude, shape[2], device, fast), f"{shape} fast={fast}")


@scalings
def test_runs_repeat_their_bits(scaling, device):
    for shape in ((300, 257, 1030), (256, 512, 4096)):
        a, b = operands(shape, scaling, FORMATS[2], device, whole=False)
        first = gemm_fp8(*a.arguments, *b.arguments, torch.bfloat16, None, False)
        out = torch.zeros(shape[1], shape[0], device=device)
        gemm_fp8_accumulate(*a.arguments, *b.arguments, out, False, False)
        for _ in range(3):
            assert_same_bits(gemm_fp8(*a.arguments, *b.arguments, torch.bfloat16, None, False), first)
            again = torch.zeros_like(out)
            gemm_fp8_accumulate(*a.arguments, *b.arguments, again, False, False)
            assert_same_bits(again, out)


@scalings
def test_memory_of_the_operand_does_not_matter(scaling, device):
    """Padded memory, a tight copy, a copy at an odd address, one scale or a scale and its inverse: the same bits."""
    a, b = operands((130, 33, 300), scaling, FORMATS[0], device, whole=False)
    want = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)
    for operand in (a, b):
        data, scale_inv = operand.data, operand.scale_inv
        operand.data = data.contiguous()
        assert_same_bits(gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False), want, "tight")
        odd = torch.empty(data.numel() + 1, dtype=torch.uint8, device=device)[1:].view(data.shape)
        operand.data = odd.copy_(data)
        operand.scale_inv = torch.empty(scale_inv.numel() + 1, device=device)[1:].view(scale_inv.shape).copy_(scale_inv)
        assert_same_bits(gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False), want, "odd")
        operand.data = data.T.contiguous().T
        if scaling[0] == TENSOR:
            operand.scale_inv = scale_inv[:1]
        assert_same_bits(gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False), want, "transposed")


@scalings
def test_nothing_to_multiply(scaling, device):
    for shape in ((0, 5, 16), (5, 0, 16), (5, 7, 0), (0, 0, 0)):
        a, b = operands(shape, scaling, FORMATS[0], device)
        bias = randn(shape[0], device=device)
        d = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)
        assert_same_bits(d, torch.zeros(shape[1], shape[0]))
        d = gemm_fp8(*a.arguments, *b.arguments, torch.bfloat16, bias, False)
        assert_same_bits(d, bias.cpu().bfloat16().expand(shape[1], shape[0]).contiguous())
        out = torch.ones(shape[1], shape[0], device=device)
        gemm_fp8_accumulate(*a.arguments, *b.arguments, out, False, False)
        assert_same_bits(out, torch.ones(shape[1], shape[0]))
        gemm_fp8_accumulate(*a.arguments, *b.arguments, out, True, False)
        assert_same_bits(out, torch.zeros(shape[1], shape[0]))


def test_nan_and_inf_reach_the_result(device):
    a, b = operands((16, 16, 16), (TENSOR, TENSOR), FORMATS[0], device)
    a.data[3, 5] = 0x7F  # NaN
    d = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)
    assert d[:, 3].isnan().all() and not d[:, :3].isnan().any() and not d[:, 4:].isnan().any()


def test_outputs_may_be_changed_in_place(device):
    a, b = operands((17, 5, 16), (TENSOR, TENSOR), FORMATS[0], device)
    d = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)
    want = d + 1
    w = torch.ones((), device=device, requires_grad=True)
    assert_same_bits(d.add_(w).detach(), want)


@scalings
def test_opcheck(scaling, device):
    a, b = operands((130, 33, 300), scaling, FORMATS[1], device)
    bias = randn(130, dtype=torch.bfloat16, device=device)
    for each_bias in (None, bias):
        torch.library.opcheck(
            torch.ops.te.gemm_fp8.default, (*a.arguments, *b.arguments, torch.bfloat16, each_bias, False)
        )
    out = torch.zeros(33, 130, device=device)
    torch.library.opcheck(torch.ops.te.gemm_fp8_accumulate.default, (*a.arguments, *b.arguments, out, False, False))


def test_compiles_whole(device):
    a, b = operands((130, 33, 300), (BLOCK_2D, BLOCK_1D), FORMATS[0], device)

    def f(a_data, a_scale, b_data, b_scale, out):
        gemm_fp8_accumulate(a_data, a_scale, a.code, b_data, b_scale, b.code, out, False, False)
        return gemm_fp8(a_data, a_scale, a.code, b_data, b_scale, b.code, torch.bfloat16, None, False) * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    outs = [torch.ones(33, 130, device=device) for _ in range(2)]
    tensors = (a.data, a.scale_inv, b.data, b.scale_inv)
    assert_same_bits(compiled(*tensors, outs[0]), f(*tensors, outs[1]))
    assert_same_bits(*outs)


REFUSED = [
    ("both E5M2", {"formats": (True, True)}, NotImplementedError, "E5M2"),
    ("tensor with blocks", {"scaling": (TENSOR, BLOCK_1D)}, NotImplementedError, "per-tensor and 1 x 128"),
    ("blocks with tensor", {"scaling": (BLOCK_2D, TENSOR)}, NotImplementedError, "128 x 128 and per-tensor"),
    ("squares", {"scaling": (BLOCK_2D, BLOCK_2D)}, NotImplementedError, "128 x 128 and 128 x 128"),
    ("fast blocks", {"scaling": (BLOCK_2D, BLOCK_1D), "fast": True}, NotImplementedError, "'fast'"),
    ("depth", {"depth": 33}, ValueError, "'b'"),
    ("float8 out", {"out_dtype": torch.float8_e4m3fn}, ValueError, "'out_dtype'"),
    ("double out", {"out_dtype": torch.float64}, ValueError, "'out_dtype'"),
    ("bias size", {"bias": 16}, ValueError, "'bias'"),
    ("code", {"code": 6}, ValueError, "'a_code'"),
    ("data dtype", {"data": torch.int8}, ValueError, "'a'"),
    ("scale dtype", {"scale": torch.float64}, ValueError, "'a_scale_inv'"),
    ("scale shape", {"scaling": (BLOCK_1D, BLOCK_1D), "cut": True}, ValueError, "'a_scale_inv'"),
]


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("what, change, error, word", REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_by_name(what, change, error, word, meta, device):
    if meta and error is NotImplementedError:
        pytest.skip("fake tensors take it for a missing kernel: such a call is refused when it runs")
    scaling = change.get("scaling", (TENSOR, TENSOR))
    a, b = operands((17, 16, 32), scaling, change.get("formats", FORMATS[0]), device)
    if "depth" in change:
        b = Operand(16, change["depth"], scaling[1], False, device)
    bias = torch.zeros(change["bias"], device=device) if "bias" in change else None
    data = a.data.to(change["data"]) if "data" in change else a.data
    scale = a.scale_inv.to(change["scale"]) if "scale" in change else a.scale_inv
    scale = scale[:, :-1] if "cut" in change else scale
    code = change.get("code", a.code)
    tensors = [data, scale, b.data, b.scale_inv]
    mode = FakeTensorMode() if meta else None
    if meta:
        tensors = [mode.from_tensor(t) for t in tensors]
        bias = bias if bias is None else mode.from_tensor(bias)
    with refused(error, "gemm_fp8", word):
        data, scale, b_data, b_scale = tensors
        out_dtype = change.get("out_dtype", torch.float32)
        gemm_fp8(data, scale, code, b_data, b_scale, b.code, out_dtype, bias, change.get("fast", False))


def test_accumulate_refuses_by_name(device):
    a, b = operands((17, 16, 32), (TENSOR, TENSOR), FORMATS[0], device)
    for out, word in (
        (torch.zeros(17, 16, device=device), "shape"),
        (torch.zeros(16, 34, device=device)[:, ::2], "contiguous"),
        (torch.zeros(16, 17, device=device, dtype=torch.float64), "dtype"),
    ):
        with refused(ValueError, "gemm_fp8", word):
            gemm_fp8_accumulate(*a.arguments, *b.arguments, out, False, False)
        assert not out.any()


def test_scales_are_rounded_as_promised():
    """The assumptions of the CPU's bound above: one rounding of data * scale_inv, and float32 sums."""
    a, b = operands((16, 16, 1), (TENSOR, TENSOR), FORMATS[0], "cpu", whole=False)
    d = gemm_fp8(*a.arguments, *b.arguments, torch.float32, None, False)
    want = product(a, b)[0]
    assert_within(d, want, 3 * U32 * wide(want).abs() * (1 + 4 * U32))


# ---- on quantized tensors ----

DIRECTIONS = {"fprop": (False, False), "dgrad": (True, False), "wgrad": (True, True)}


def quantizers(kind, device):
    """Of a weight, of an input and of an output gradient, as recipes choose them."""
    if kind == "block":
        return [_C.Quantizer(scaling, False, True, 0.0) for scaling in ("block2d", "block1d", "block1d")]
    return [_C.Quantizer("current", e5m2, False, 0.0) for e5m2 in (False, False, True)]


def value(quantized, columnwise):
    """The values of one direction, in float64 [outer, depth]."""
    data, scale_inv = quantized.rowwise, quantized.rowwise_scale_inv
    if columnwise:
        data, scale_inv = quantized.columnwise, quantized.columnwise_scale_inv
    fp8 = data.cpu().contiguous().view(TORCH_DTYPES[quantized.e5m2]).double()
    return fp8 * over_elements(scale_inv.cpu(), quantized.scaling, *data.shape).double()


@pytest.mark.parametrize("kind", ["current", "block"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_directions_of_a_linear_layer(direction, kind, device):
    """The three products from a quantizer's tensors, with their pitch, at shapes that 16 does not divide."""
    for m, n, k in ((1, 1, 1), (5, 7, 9), (33, 130, 300), (257, 48, 144)):
        shapes = {"fprop": ((n, k), (m, k)), "dgrad": ((n, k), (m, n)), "wgrad": ((m, k), (m, n))}[direction]
        chosen = {"fprop": (0, 1), "dgrad": (0, 2), "wgrad": (1, 2)}[direction]
        made = [quantizers(kind, device)[i] for i in chosen]
        a, b = (_C.quantize(q, randn(*s, device=device), True, True) for q, s in zip(made, shapes, strict=True))
        a_columnwise, b_columnwise = DIRECTIONS[direction]
        left, right = value(b, b_columnwise), value(a, a_columnwise)
        want, magnitude, depth = left @ right.T, left.abs() @ right.abs().T, left.shape[1]
        d = _C.gemm_fp8(a, a_columnwise, b, b_columnwise, torch.float32)
        assert_within(d, want, fp8_sum_error(magnitude, depth, device, False), f"{direction} {m, n, k}")
        out = torch.ones_like(d)
        _C.gemm_fp8_accumulate(a, a_columnwise, b, b_columnwise, out, False)
        assert_within(out, want + 1, fp8_sum_error(magnitude + 1, depth + 1, device, False), f"{direction} {m, n, k}")


def test_a_missing_direction_is_named(device):
    q = _C.quantize(_C.Quantizer("current"), randn(16, 16, device=device), True, False)
    with refused(ValueError, "gemm_fp8", "'b'", "columnwise"):
        _C.gemm_fp8(q, False, q, True, torch.float32)
