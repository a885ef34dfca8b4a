# quantize, the quantizers of the binding: bytes and scales equal to plain_fp8.py's for every format, scaling, dtype,
# direction and shape; special values, padding, round trips, amax and scale state, no-op flag.
import itertools

import plain_fp8 as plain
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import DTYPES, assert_same_bits, in_threads, layouts

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import dequantize

from .cases import (
    DIRECTIONS,
    KINDS,
    SHAPES,
    check_padding,
    check_quantized,
    draw,
    expected,
    quantizer,
    same_bytes,
)

# ---- bytes and scales ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_plain_pytorch(kind, dtype, device):
    for shape, e5m2, pow_2 in itertools.product(SHAPES, (False, True), (False, True)):
        x = draw(*shape, dtype, device)
        want = expected(kind, x, e5m2, pow_2)
        for rowwise, columnwise in DIRECTIONS:
            q = _C.quantize(quantizer(kind, device, e5m2, pow_2), x, rowwise, columnwise)
            assert (q.rowwise is not None, q.columnwise is not None) == (rowwise, columnwise)
            assert (q.scaling, q.e5m2) == (plain.SCALINGS[kind], e5m2)
            check_quantized(q, want, e5m2, f"{shape} e5m2={e5m2} pow_2={pow_2} {rowwise} {columnwise}")


SIZES = st.one_of(st.sampled_from((0, 1, 16, 127, 128, 129, 300)), st.integers(1, 520))


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(rows=3, cols=50257, dtype=torch.bfloat16, kind="block1d", e5m2=False, pow_2=True, both=(True, True), seed=0)
@example(rows=4097, cols=40, dtype=torch.bfloat16, kind="block1d", e5m2=False, pow_2=True, both=(True, True), seed=0)
@example(rows=50257, cols=17, dtype=torch.float16, kind="current", e5m2=True, pow_2=False, both=(False, True), seed=0)
@given(
    rows=SIZES,
    cols=SIZES,
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    e5m2=st.booleans(),
    pow_2=st.booleans(),
    both=st.sampled_from(DIRECTIONS),
    seed=st.integers(0, 1000),
)
def test_equals_plain_pytorch_at_any_shape(device, rows, cols, dtype, kind, e5m2, pow_2, both, seed):
    x = draw(rows, cols, dtype, device, seed)
    q = _C.quantize(quantizer(kind, device, e5m2, pow_2), x, *both)
    check_quantized(q, expected(kind, x, e5m2, pow_2), e5m2, kind)


SPECIALS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -3e-39, 6e-8, 3e38, -65504.0, 448.0, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("e5m2", (False, True))
def test_special_values(kind, dtype, e5m2, device):
    """NaN stays NaN and no amax sees it; Inf saturates and gives scale 1; zeros and denormals divide nothing."""
    tile = torch.zeros(260, 390)
    tile[::7, ::11] = 1.0
    for i, special in enumerate(SPECIALS):
        tile[3 + 20 * i, 5:40:3] = special  # several in one row, one in each of some columns
        tile[130:140, 130 + i] = special
    alone = [torch.full((5, 33), special) for special in SPECIALS]
    for x in (tile, *alone):
        x = x.to(dtype).to(device)
        for pow_2, epsilon in ((False, 0.0), (True, 0.0), (False, 1e-4), (True, 3.0)):
            q = _C.quantize(quantizer(kind, device, e5m2, pow_2, epsilon), x, True, True)
            check_quantized(q, expected(kind, x, e5m2, pow_2, epsilon), e5m2, f"{x[0, 0]} {pow_2} {epsilon}")


@pytest.mark.parametrize("e5m2", (False, True))
def test_every_16_bit_value(e5m2, device):
    """All patterns of both 16-bit dtypes, at a scale that spreads them over the format."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
    for dtype, scale in itertools.product((torch.float16, torch.bfloat16), (1.0, 0.37, 2.0**-20)):
        x = patterns.view(dtype).to(device)
        q = _C.quantize(quantizer("delayed", device, e5m2, scale=scale), x, True, True)
        check_quantized(q, expected("delayed", x, e5m2, scale=scale), e5m2, f"{dtype} {scale}")


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_leading_dimensions(kind, device):
    x = draw(24, 136, torch.bfloat16, device)
    want = expected(kind, x)
    for name, other in layouts(x):
        check_quantized(_C.quantize(quantizer(kind, device), other, True, True), want, False, name)
    check_quantized(_C.quantize(quantizer(kind, device), x.view(2, 3, 4, 136), True, True), want, False, "4-D")
    flat = draw(1, 136, torch.bfloat16, device)
    check_quantized(_C.quantize(quantizer(kind, device), flat[0], True, True), expected(kind, flat), False, "1-D")


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_repetition_give_the_same_bits(kind, device):
    x = draw(300, 520, torch.bfloat16, device)
    results = in_threads(6, lambda _: _C.quantize(quantizer(kind, device), x, True, True))
    for q in results[1:]:
        for name in ("rowwise", "rowwise_scale_inv", "columnwise", "columnwise_scale_inv"):
            assert_same_bits(getattr(q, name), getattr(results[0], name), name)


# ---- in place, no-op, state ----


@pytest.mark.parametrize("kind", KINDS)
def test_out_is_written_in_place_unless_the_flag_is_set(kind, device):
    x, other = (draw(40, 130, torch.float32, device, seed) for seed in (1, 2))
    handle = quantizer(kind, device)
    out = _C.quantize(handle, x, True, True)
    address = out.rowwise.data_ptr()
    kept_amax = handle.amax.clone() if handle.amax is not None else None
    skipped = _C.quantize(handle, other, True, True, torch.ones(1, device=device), out)
    assert skipped.rowwise.data_ptr() == address
    check_quantized(out, expected(kind, x), False, "no-op")
    if kept_amax is not None:
        assert_same_bits(handle.amax, kept_amax, "amax of a no-op")
    _C.quantize(handle, other, True, True, torch.zeros(1, device=device), out)
    assert out.rowwise.data_ptr() == address
    check_quantized(out, expected(kind, other), False, "in place")
    view = _C.Quantized(out.scaling, out.e5m2, out.rowwise, out.rowwise_scale_inv)
    assert view.columnwise is None and view.rowwise.data_ptr() == address


@pytest.mark.parametrize("shape", ((0, 8), (1, 1), (33, 300), (700, 4096)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(shape, dtype, device):
    x = draw(*shape, dtype, device)
    if x.numel() > 5:
        x[0, 3] = float("nan")
    want = plain.magnitudes(x.cpu()).max().reshape(1) if x.numel() else torch.zeros(1)
    assert_same_bits(_C.quantize_amax(x).cpu(), want)
    handle = quantizer("delayed", device)
    _C.quantize(handle, x, True, True)
    assert_same_bits(handle.amax.cpu(), want, "delayed")
    _C.quantize(handle, x / 2, True, False)
    assert_same_bits(handle.amax.cpu(), want, "a smaller one changes nothing")
    measured = torch.full((1,), -1.0, device=device)
    _C.quantize(_C.Quantizer("current", amax=measured), x, False, True)
    assert_same_bits(measured.cpu(), want, "current")


def test_current_scaling_by_an_amax_from_outside(device):
    """As a group of processes does: amaxes first, their largest, then the data by it."""
    halves = draw(64, 200, torch.bfloat16, device).chunk(2)
    amax = torch.maximum(*(_C.quantize_amax(x) for x in halves))
    whole = expected("current", torch.cat(halves))
    for i, x in enumerate(halves):
        q = _C.quantize(_C.Quantizer("current"), x, True, False, amax=amax)
        same_bytes(q.rowwise, whole[0][32 * i : 32 * i + 32], False, "half")
        assert_same_bits(q.rowwise_scale_inv.cpu(), whole[1])


def test_update_of_scales(device):
    nan, inf = float("nan"), float("inf")
    history = torch.tensor(
        [[1.0, 0.0, inf, 5.0, 1e-39, 3e38], [2.0, 0.0, 3.0, nan, 0.0, 0.0], [7.0, 0.0, 1.0, 4.0, 0.0, 0.0]]
    )
    for (margin, most_recent, pow_2), e5m2 in itertools.product(
        ((0, False, False), (3, False, True), (0, True, False), (1, True, True), (200, False, False)), (False, True)
    ):
        work, scale = history.clone().to(device), torch.full((6,), 0.5, device=device)
        long = torch.rand(1024, 1).to(device)
        long_before, long_scale = long.clone(), torch.ones(1, device=device)
        single, single_scale = torch.tensor([[4.0]], device=device), torch.ones(1, device=device)
        updates = [(work, scale, plain.fp8_max(e5m2), margin, most_recent, pow_2)]
        updates += [(long, long_scale, 448.0, 0, False, False), (single, single_scale, 448.0, 0, False, False)]
        _C.update_scales(updates)
        amax = history[0] if most_recent else history.nan_to_num(0.0, inf).amax(0)
        want = (torch.tensor(plain.fp8_max(e5m2)) / amax).double() / 2.0**margin
        want = want.clamp(torch.finfo(torch.float32).tiny, plain.FLT_MAX).float()
        want = plain.drop_mantissa(want) if pow_2 else want
        want = torch.where((amax == 0) | ~amax.isfinite(), torch.tensor(0.5), want)
        assert_same_bits(scale.cpu(), want, f"{margin} {most_recent} {pow_2}")
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        assert_same_bits(work.cpu(), rolled, "history")
        rolled = long_before.roll(-1, 0)
        rolled[0] = 0
        assert_same_bits(long, rolled, "long history")
        assert_same_bits(long_scale.cpu(), (torch.tensor(448.0) / long_before.cpu().max()).reshape(1), "long")
        assert (single.item(), single_scale.item()) == (0.0, 112.0)
    many = [(torch.full((2, 1), i + 1.0, device=device), torch.ones(1, device=device)) for i in range(70)]
    _C.update_scales([(h, s, 448.0, 0, False, False) for h, s in many])
    assert [s.item() for _, s in many] == [(torch.tensor(448.0) / (i + 1)).item() for i in range(70)]
    _C.update_scales([])


# ---- back ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(kind, dtype, device):
    """Dequantized bits equal plain PyTorch, and are within half an ulp of FP8 of x, where x was not out of range."""
    for shape, e5m2 in itertools.product(SHAPES, (False, True)):
        x = draw(*shape, torch.float32, device)
        want = expected(kind, x, e5m2)
        q = _C.quantize(quantizer(kind, device, e5m2), x, True, True)
        for columnwise, data, scales in ((False, *want[:2]), (True, *want[2:])):
            back = plain.dequantize(data, scales, q.scaling, e5m2, dtype)
            one = (q.columnwise, q.columnwise_scale_inv) if columnwise else (q.rowwise, q.rowwise_scale_inv)
            got = dequantize(*one, scaling=q.scaling, e5m2=e5m2, columnwise=columnwise, dtype=dtype)
            assert_same_bits(got.cpu(), back.T if columnwise else back, f"{shape} {columnwise}")
            if kind == "delayed" or dtype != torch.float32:
                continue
            # Half an ulp: 2^-4 (2^-3) relative for 3 (2) bits of mantissa, and half of the least subnormal, which is
            # 2^-10 (2^-17) of a block whose largest value became fp8_max; with 4 roundings of float32 in between.
            relative, least = (2.0**-3, 2.0**-17) if e5m2 else (2.0**-4, 2.0**-10)
            block_amax = x.abs().max().item() / plain.fp8_max(e5m2) if x.numel() else 0.0
            bound = (x.abs() * relative + least * block_amax) * (1 + 2.0**-21)
            assert bool(((got - x).abs() <= bound).all()), f"{shape} {columnwise}"
        assert_same_bits(_C.dequantize(q, dtype).cpu(), plain.dequantize(*want[:2], q.scaling, e5m2, dtype))


def test_dequantize_takes_any_pitch(device):
    x = draw(19, 33, torch.bfloat16, device)
    for kind in KINDS:
        q = _C.quantize(quantizer(kind, device), x, True, True)
        want = _C.dequantize(q, torch.bfloat16)
        loose = torch.empty(19 * 33 + 1, dtype=torch.uint8, device=device)[1:].view(19, 33).copy_(q.rowwise)
        other = _C.Quantized(q.scaling, False, loose, q.rowwise_scale_inv)
        assert_same_bits(_C.dequantize(other, torch.bfloat16), want, kind)


@pytest.mark.parametrize("shape", SHAPES)
def test_transpose_of_bytes(shape, device):
    data = torch.randint(0, 256, shape, dtype=torch.uint8).to(device)
    for source in (data, torch.empty(*shape[:-1], shape[-1] + 3, dtype=torch.uint8, device=device)[:, : shape[1]]):
        transposed = _C.fp8_transpose(source.copy_(data))
        assert_same_bits(transposed.contiguous(), data.T.contiguous())
        check_padding(transposed, "transpose")
