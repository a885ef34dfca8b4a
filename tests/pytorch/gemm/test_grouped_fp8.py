# Grouped FP8 products below the module: the registered ops that compiled calls and CUDA take. Rows come from
# te.grouped_quantize, weights from _C.quantize; oracles are float64 products of what each group's bytes mean, and, on
# the CPU, _C.gemm_fp8 of each group alone, bit for bit. Mutants: scales of group 0 for all, `how` swapped, the tail not
# zeroed, panels of x and dy exchanged: each turns tests here red.
from types import SimpleNamespace

import plain_fp8 as plain
import pytest
import torch
from support import assert_same_bits, assert_within, fp8_sum_error, randn, refused, rounding

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import grouped_offsets

K, N = 136, 72
SPLITS = [7, 0, 130, 1]
LIVE = sum(SPLITS)
ROWS = LIVE + 5
# scaling of rows and of weights, by the recipe
SCALINGS = {"current": (0, 0), "block": (1, 2)}
recipes = pytest.mark.parametrize("recipe", SCALINGS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def groups(t):
    return t[:LIVE].split(SPLITS)


def case(recipe, device, dtype=torch.bfloat16, e5m2=True):
    """Operands of the three products as the ops take them, and of each group alone."""
    kind, of_weight = {"current": ("current", "current"), "block": ("block1d", "block2d")}[recipe]
    forward, backward = (_C.Quantizer(kind, e, recipe == "block", 0.0) for e in (False, e5m2))
    for_weights = _C.Quantizer(of_weight, False, recipe == "block", 0.0)
    spec = _C.ProductQuantization(forward, for_weights, backward, True, True, True).spec
    c = SimpleNamespace(dtype=dtype, codes=[2 * SCALINGS[recipe][0] + int(e) for e in (False, e5m2)])
    x, dy = (randn(ROWS, width, dtype=dtype, device=device) for width in (K, N))
    x[LIVE:], dy[LIVE:] = torch.nan, torch.nan
    c.offsets = grouped_offsets(torch.tensor(SPLITS, device=device), x)
    c.x, c.dy = (
        torch.ops.te.grouped_quantize(t, c.offsets, part, True, True) for t, part in ((x, spec[:4]), (dy, spec[8:12]))
    )
    for t in (c.x, c.dy):  # rows and panels after those of the last group
        t[0][LIVE:] = 0x7F
        t[2][4:] = 0x7F
    weights = [randn(N, K, dtype=dtype, device=device) for _ in SPLITS]
    c.biases = [randn(N, dtype=dtype, device=device) for _ in SPLITS]
    c.weights = [_C.quantize(for_weights, w, True, True) for w in weights]
    c.rowwise = [w.rowwise for w in c.weights], [w.rowwise_scale_inv for w in c.weights]
    c.columnwise = [w.columnwise for w in c.weights], [w.columnwise_scale_inv for w in c.weights]
    c.alone = [
        (_C.quantize(forward, a, True, True), _C.quantize(backward, b, True, True), w)
        for a, b, w in zip(groups(x), groups(dy), c.weights, strict=True)
    ]
    return c


def value(q, columnwise, scaling, e5m2=False):
    data, scales = (q.columnwise, q.columnwise_scale_inv) if columnwise else (q.rowwise, q.rowwise_scale_inv)
    return plain.dequantize(data.cpu(), scales.cpu(), scaling, e5m2, torch.float64)


def fprop(c, **options):
    biases = options.get("biases", c.biases)
    return torch.ops.te.grouped_fp8_fprop(*c.x[:2], c.codes[0], *c.rowwise, biases, c.offsets, c.dtype)


def dgrad(c):
    return torch.ops.te.grouped_fp8_dgrad(*c.dy[:2], c.codes[1], *c.columnwise, c.offsets, c.dtype)


def panels(c):
    return *c.dy[2:], c.codes[1], *c.x[2:], c.codes[0], c.offsets


def wgrad(c, dtype=None):
    return torch.ops.te.grouped_fp8_wgrad(*panels(c), dtype or c.dtype)


@recipes
@dtypes
@pytest.mark.parametrize("e5m2", [False, True])
def test_against_float64(recipe, dtype, e5m2, device):
    c = case(recipe, device, dtype, e5m2)
    rows, of_weight = SCALINGS[recipe]
    y, dx, dweights = fprop(c), dgrad(c), wgrad(c)
    assert not y[LIVE:].any() and not dx[LIVE:].any()
    for i, (x, dy, w) in enumerate(c.alone):
        a, b = value(x, False, rows), value(dy, False, rows, e5m2)
        down, back = value(w, False, of_weight), value(w, True, of_weight).T
        columns = value(x, True, rows).T, value(dy, True, rows, e5m2).T
        bias = c.biases[i].double().cpu()
        for what, got, one, other, added, depth in (
            ("y", groups(y)[i], a, down.T, bias, K),
            ("dx", groups(dx)[i], b, back, 0.0, N),
            ("dweight", dweights[i], columns[1].T, columns[0], 0.0, SPLITS[i]),
        ):
            exact = one @ other + added
            magnitude = one.abs() @ other.abs() + abs(added)
            bound = fp8_sum_error(magnitude, depth + 1, device, False) + rounding(exact, dtype) * 2
            assert_within(got.cpu(), exact, bound, f"{what} {i}")


@recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_cpu_each_group_is_gemm_fp8_of_it_alone(recipe, dtype):
    c = case(recipe, "cpu", dtype)
    y, dx, dweights = fprop(c), dgrad(c), wgrad(c)
    outs, wanted = ([torch.full((N, K), 3.0) for _ in SPLITS] for _ in range(2))
    how = [0, 1, 0, 1]
    torch.ops.te.grouped_fp8_wgrad_accumulate(*panels(c), outs, how)
    for i, (x, dy, w) in enumerate(c.alone):
        assert_same_bits(groups(y)[i], _C.gemm_fp8(w, False, x, False, dtype, c.biases[i]))
        assert_same_bits(groups(dx)[i], _C.gemm_fp8(w, True, dy, False, dtype))
        assert_same_bits(dweights[i], _C.gemm_fp8(x, True, dy, True, dtype))
        _C.gemm_fp8_accumulate(x, True, dy, True, wanted[i], how[i] == 1)
        assert_same_bits(outs[i], wanted[i])


@recipes
def test_accumulation_is_requested_group_by_group(recipe, device):
    c = case(recipe, device)
    how = [0, 1, -1, 0]
    for dtype in (torch.float32, torch.bfloat16):
        fresh = wgrad(c, torch.float32)
        outs = [torch.full((N, K), 3.0, dtype=dtype, device=device) for _ in range(3)]
        versions = [out._version for out in outs]
        torch.ops.te.grouped_fp8_wgrad_accumulate(*panels(c), outs, how)
        for out, before, i in zip(outs, versions, (0, 1, 3), strict=True):
            exact = fresh[i].double() + (3.0 if how[i] == 0 else 0.0)
            assert_within(out, exact, rounding(exact.abs() + 3, dtype) + 2.0**-20 * exact.abs(), f"main_grad {i}")
            assert out._version > before


@recipes
def test_misaligned_operands_are_copied(recipe, device):
    c = case(recipe, device)
    want = fprop(c), dgrad(c), wgrad(c)

    def odd(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    c.x, c.dy = ((odd(t[0]), t[1], odd(t[2]), t[3]) for t in (c.x, c.dy))
    c.rowwise, c.columnwise = (([odd(t) for t in data], scales) for data, scales in (c.rowwise, c.columnwise))
    for a, b in zip((fprop(c), dgrad(c), *wgrad(c)), (*want[:2], *want[2]), strict=True):
        assert_same_bits(a, b)


@recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_as_one_tensor(recipe, dtype, device):
    c = case(recipe, device, dtype)
    assert_same_bits(torch.ops.te.grouped_fp8_wgrad_stacked(*panels(c), dtype), torch.stack(wgrad(c)))


@recipes
def test_schemas_and_meta(recipe, device):
    c = case(recipe, device)
    ops, opcheck, tests = torch.ops.te, torch.library.opcheck, ("test_schema", "test_faketensor")
    opcheck(
        ops.grouped_fp8_fprop.default,
        (*c.x[:2], c.codes[0], *c.rowwise, c.biases, c.offsets, c.dtype),
        test_utils=tests,
    )
    opcheck(ops.grouped_fp8_dgrad.default, (*c.dy[:2], c.codes[1], *c.columnwise, c.offsets, c.dtype), test_utils=tests)
    opcheck(ops.grouped_fp8_wgrad.default, (*panels(c), torch.float32), test_utils=tests)
    opcheck(ops.grouped_fp8_wgrad_stacked.default, (*panels(c), torch.float32), test_utils=tests)
    outs = [torch.zeros(N, K, device=device) for _ in range(3)]
    opcheck(ops.grouped_fp8_wgrad_accumulate.default, (*panels(c), outs, [0, -1, 1, 0]), test_utils=tests)


@recipes
def test_bad_operands_are_named(recipe, device):
    c = case(recipe, device)
    ops = torch.ops.te

    def forward(x=c.x[0], scales=c.x[1], code=c.codes[0], weights=c.rowwise, biases=c.biases, offsets=c.offsets):
        return ops.grouped_fp8_fprop(x, scales, code, *weights, biases, offsets, c.dtype)

    def backward(dy=c.dy[2], scales=c.dy[3], code=c.codes[1], offsets=c.offsets):
        return ops.grouped_fp8_wgrad(dy, scales, code, *c.x[2:], c.codes[0], offsets, c.dtype)

    for words, call in (
        (("'x'", "Byte"), lambda: forward(x=c.x[0].float())),
        (("'x_scale_inv'", "wanted"), lambda: forward(scales=c.x[1][:, :1])),
        (("'x_code'",), lambda: forward(code=4)),
        (("'weights_scale_inv'", "4 and 3"), lambda: forward(weights=(c.rowwise[0], c.rowwise[1][:3]))),
        (("'weights'", "columns"), lambda: forward(weights=c.columnwise)),
        (("'biases'", "4"), lambda: forward(biases=c.biases[:3])),
        (("'bias'", f"[{N}]"), lambda: forward(biases=[b[1:] for b in c.biases])),
        (("'offsets'", "[5]"), lambda: forward(offsets=c.offsets[1:])),
        (("'dy'", "panels"), lambda: backward(dy=c.dy[2].flatten(0, 1))),
        (("'dy'", "panels"), lambda: backward(dy=c.dy[2][:, :, :64])),
        (("'dy_scale_inv'",), lambda: backward(scales=c.dy[3][:, 1:])),
        (("'outs'", "'how'"), lambda: ops.grouped_fp8_wgrad_accumulate(*panels(c), [], [0, 0, 0, 0])),
    ):
        with refused(ValueError, "grouped_linear", *words):
            call()


# By dtype before anything is written: on the real device and by the Meta function alike.
@recipes
def test_gradients_of_another_dtype_are_refused(recipe, device):
    c = case(recipe, device)
    for dtype in (torch.int32, torch.float64, torch.uint8):
        outs = [torch.full((N, K), 3.0, device=device) for _ in range(2)]
        outs[1] = outs[1].to(dtype)
        for on in (lambda t: t, lambda t: t.to("meta")):
            given = [on(out) for out in outs]
            operands = [on(t) if isinstance(t, torch.Tensor) else t for t in panels(c)]
            with refused(ValueError, "grouped_linear", "'outs'", "dtype", "Float, Half or BFloat16"):
                torch.ops.te.grouped_fp8_wgrad_accumulate(*operands, given, [0, -1, -1, 1])
        assert all((out == 3).all() for out in outs)
