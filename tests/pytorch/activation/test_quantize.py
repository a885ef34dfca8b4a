# activation straight to FP8: bytes, scales, amaxes and bias gradients equal to those of the activation followed by a
# quantization, for every kind, scaling, dtype, direction and shape, forward and backward; the registered ops; errors.
import itertools

import pytest
import torch
from support import DTYPES, assert_same_bits, layouts, randn, refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import activation_kinds

KINDS = list(activation_kinds)
SCALINGS = ("delayed", "current", "block1d", "block2d")
DIRECTIONS = ((True, False), (False, True), (True, True))
# columns of y: gate and up meet inside a block of 128 but in the aligned ones; element access in the odd ones
SHAPES = ((0, 16), (3, 0), (1, 1), (5, 33), (130, 128), (17, 136), (260, 384), (129, 200))
PARTS = ("rowwise", "rowwise_scale_inv", "columnwise", "columnwise_scale_inv")


def quantizer(scaling, device, e5m2=False):
    if scaling != "delayed":
        return _C.Quantizer(scaling, e5m2, scaling == "block1d")
    return _C.Quantizer(scaling, e5m2, scale=torch.full((1,), 0.7, device=device), amax=torch.zeros(1, device=device))


def same(fused, plain, what):
    for part in PARTS:
        a, b = getattr(fused, part), getattr(plain, part)
        assert (a is None) == (b is None), f"{what} {part}"
        if a is not None:
            assert a.stride() == b.stride(), f"{what} {part}"
            assert_same_bits(a, b, f"{what} {part}")


def draw(kind, rows, cols, dtype, device):
    x = randn(rows, cols * (1 + activation_kinds[kind]), dtype=dtype, device=device, scale=3)
    return x, randn(rows, cols, dtype=dtype, device=device)


def forward_both_ways(x, kind, scaling, directions, device, e5m2):
    fused_by, plain_by = (quantizer(scaling, device, e5m2) for _ in range(2))
    fused = _C.activation_fwd_quantize(x, kind, [], fused_by, *directions)
    plain = _C.quantize(plain_by, _C.activation_fwd(x, kind, []), *directions)
    what = f"{kind} {scaling} {tuple(x.shape)} {directions}"
    same(fused, plain, what)
    if scaling == "delayed":
        assert_same_bits(fused_by.amax, plain_by.amax, what)
    return plain


def backward_both_ways(dy, x, kind, scaling, directions, y_scaling, y_directions, device):
    fused_by, plain_by = (quantizer(scaling, device, True) for _ in range(2))
    y_by = quantizer(y_scaling, device)
    y_first = _C.quantize(y_by, _C.activation_fwd(x, kind, []), True, False)
    used = y_first.rowwise_scale_inv if y_first.scaling == 0 else None
    dx, y, dbias = _C.activation_bwd_quantize(dy, x, kind, [], fused_by, directions, True, y_by, used, y_directions)
    plain_dx, plain_y = _C.activation_bwd(dy, x, kind, [], True)
    what = f"{kind} {scaling} {y_scaling} {tuple(x.shape)} {directions} {y_directions}"
    same(dx, _C.quantize(plain_by, plain_dx, *directions), f"dx {what}")
    if scaling == "delayed":
        assert_same_bits(fused_by.amax, plain_by.amax, what)
    assert_same_bits(dbias, _C.quantize_op(plain_dx, _C.Quantizer("block1d").spec, False, False, True)[4], what)
    if not any(y_directions):
        assert y is None
        return
    again = quantizer(y_scaling, device)
    if y_scaling == "current":
        again = _C.Quantizer("delayed", scale=used[1:2].clone())
    same(y, _C.quantize(again, plain_y, *y_directions), f"y {what}")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_equals_unfused(kind, scaling, device):
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x, _ = draw(kind, *shape, dtype, device)
        forward_both_ways(x, kind, scaling, DIRECTIONS[shape[0] % 3], device, e5m2=shape[1] % 2 == 1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_equals_unfused(kind, scaling, device):
    for i, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        x, dy = draw(kind, *shape, dtype, device)
        y_directions = (*DIRECTIONS, (False, False))[i % 4]
        backward_both_ways(dy, x, kind, scaling, DIRECTIONS[i % 3], SCALINGS[i // 3 % 4], y_directions, device)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_layouts_and_special_values(scaling, device):
    x, dy = draw("swiglu", 130, 128, torch.bfloat16, device)
    x[3, 5], x[4, 130], dy[7, 1], x[9, 9] = float("nan"), float("inf"), float("nan"), -float("inf")
    for (_, xs), (_, dys) in zip(layouts(x), layouts(dy), strict=True):
        forward_both_ways(xs, "swiglu", scaling, (True, True), device, False)
        backward_both_ways(dys, xs, "swiglu", scaling, (True, True), "block1d", (False, True), device)
    wide = torch.stack((x, x)).view(2, 13, 10, -1)
    folded = _C.activation_fwd_quantize(wide, "swiglu", [], quantizer(scaling, device), True, True)
    same(folded, forward_both_ways(torch.cat((x, x)), "swiglu", scaling, (True, True), device, False), "4-D")


def test_parameters_reach_the_formula(device):
    x, _ = draw("clamped_swiglu", 5, 40, torch.float32, device)
    params = [1.5, 0.9, 0.5]
    by = quantizer("block1d", device)
    fused = _C.activation_fwd_quantize(x, "clamped_swiglu", params, by, True, True)
    same(fused, _C.quantize(by, _C.activation_fwd(x, "clamped_swiglu", params), True, True), "params")


def test_a_quantizer_in_python_gets_the_activation(device):
    class Halving:
        def _quantize_native(self, x, rowwise, columnwise):
            return _C.quantize(_C.Quantizer("block1d"), x / 2, rowwise, columnwise)

    x, dy = draw("swiglu", 20, 136, torch.bfloat16, device)
    by, block = _C.Quantizer("python", python=Halving()), _C.Quantizer("block1d")
    y = _C.activation_fwd(x, "swiglu", [])
    same(_C.activation_fwd_quantize(x, "swiglu", [], by, True, True), _C.quantize(block, y / 2, True, True), "y")
    dx, again, dbias = _C.activation_bwd_quantize(
        dy, x, "swiglu", [], by, (True, False), True, block, None, (False, True)
    )
    plain = _C.activation_bwd(dy, x, "swiglu", [], False)[0]
    same(dx, _C.quantize(block, plain / 2, True, False), "dx")
    same(again, _C.quantize(block, y, False, True), "y again")
    assert_same_bits(dbias, _C.quantize_op(plain, block.spec, False, False, True)[4])


def bad_calls(device):
    x, dy = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    block, current = _C.Quantizer("block1d"), _C.Quantizer("current")
    both = (True, True)

    def backward(dy, x, y_by=block, used=None):
        return _C.activation_bwd_quantize(dy, x, "swiglu", [], block, both, False, y_by, used, both)

    return (
        (lambda: _C.activation_fwd_quantize(x[:, :7], "swiglu", [], block, True, True), ("'x'", "[3, 7]", "even")),
        (lambda: _C.activation_fwd_quantize(x.int(), "silu", [], block, True, True), ("'x'", "int32", "bfloat16")),
        (lambda: _C.activation_fwd_quantize(x, "swish", [], block, True, True), ("'kind'", "'swish'")),
        (lambda: _C.activation_fwd_quantize(x, "silu", [], _C.Quantizer("none"), True, True), ("'quantizer'",)),
        (lambda: backward(dy[:2], x), ("'dy'", "[2, 4]", "[3, 4]")),
        (lambda: backward(dy.half(), x), ("'dy'", "Half", "Float")),
        (lambda: backward(dy, x, current), ("'used_scales'", "no scale")),
    )


def test_bad_input_is_named(device):
    for call, words in bad_calls(device):
        with refused(ValueError, *words):
            call()
