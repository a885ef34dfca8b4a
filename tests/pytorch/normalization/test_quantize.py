# The norm whose output is FP8 where it is made: the bytes, scales and amax of the norm followed by the quantizer, for
# each kind of scaling, norm, dtype and odd shape, and again from the saved statistics; ops, empty rows, refusals.
# Mutant: `g[j]` for `g[j] + shift` in Normalized::compute (normalization_quantize.cu; on the CPU: 0.f for the shift in
# known(), normalization.cpp) turns test_bytes_are_those_of_norm_then_quantize red.
import pytest
import torch
from support import DTYPES, assert_same_bits, layouts, randn, refused

from transformer_engine.pytorch import _C

KINDS = ("delayed", "current", "block1d", "block2d")
DIRECTIONS = ((True, True), (True, False), (False, True))
SHAPES = ((1, 1), (3, 5), (17, 130), (130, 17), (2, 3, 48), (300, 136), (128, 512), (260, 1000))
FIELDS = ("rowwise", "rowwise_scale_inv", "columnwise", "columnwise_scale_inv")
kinds = pytest.mark.parametrize("kind", KINDS)


def quantizer_of(kind, device, e5m2=False, pow_2=False):
    if kind != "delayed":
        return _C.Quantizer(kind, e5m2, pow_2, 0.0)
    return _C.Quantizer(kind, e5m2, pow_2, 0.0, torch.full((1,), 37.5, device=device), torch.zeros(1, device=device))


def norm_arguments(shape, dtype, device, rms, residual=True, gamma_dtype=None):
    hidden, gamma_dtype = shape[-1], gamma_dtype or dtype
    x = randn(*shape, dtype=dtype, device=device)
    other = randn(*shape, dtype=dtype, device=device) if residual else None
    gamma = randn(hidden, dtype=gamma_dtype, device=device)
    beta = None if rms else randn(hidden, dtype=gamma_dtype, device=device)
    return x, other, gamma, beta, 1e-5, rms


def assert_same_quantized(got, want, what=""):
    for field in FIELDS:
        a, b = getattr(got, field), getattr(want, field)
        assert (a is None) == (b is None), f"{what} {field}"
        if a is not None:
            assert a.stride() == b.stride(), f"{what} {field}"
            assert_same_bits(a.contiguous(), b.contiguous(), f"{what} {field}")


def check(arguments, zero_centered, kind, directions, what="", **options):
    device = arguments[0].device
    twins = [quantizer_of(kind, device, **options) for _ in range(2)]
    y, h, mean, rstd = _C.normalization_fwd(*arguments, zero_centered)
    want = _C.quantize(twins[0], y, *directions)
    got, no_y, h_too, mean_too, rstd_too = _C.normalization_fwd_quantize(
        *arguments, zero_centered, twins[1], *directions, False
    )
    assert no_y is None, what
    for a, b in ((h_too, h), (mean_too, mean), (rstd_too, rstd)):
        assert_same_bits(a, b, what)
    assert_same_quantized(got, want, what)
    if kind == "delayed":
        assert_same_bits(twins[1].amax, twins[0].amax, what)
        assert twins[1].amax.item() == (y.abs().max().item() if y.numel() else 0)
    h = arguments[0] if arguments[1] is None else h
    used = got.rowwise_scale_inv if directions[0] else got.columnwise_scale_inv
    before = None if twins[1].amax is None else twins[1].amax.clone()
    again = _C.normalization_again_quantize(
        h, arguments[2], arguments[3], mean, rstd, arguments[5], zero_centered, twins[1].spec, used, *directions
    )
    assert_same_quantized(again, want, f"{what} again")
    assert before is None or torch.equal(before, twins[1].amax)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@kinds
def test_bytes_are_those_of_norm_then_quantize(kind, rms, residual, device):
    for shape in SHAPES:
        for zero_centered in (False, True):
            for directions in DIRECTIONS:
                arguments = norm_arguments(shape, torch.bfloat16, device, rms, residual)
                check(arguments, zero_centered, kind, directions, f"{shape} {directions}")


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
def test_dtypes_formats_and_scales(kind, dtype, device):
    for gamma_dtype in DTYPES:
        for options in ({"e5m2": True}, {"pow_2": True}):
            arguments = norm_arguments((130, 264), dtype, device, False, gamma_dtype=gamma_dtype)
            check(arguments, False, kind, (True, True), f"{gamma_dtype} {options}", **options)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [(1, 1032), (1500, 2048), (130, 7168), (260, 8192), (130, 8200), (20, 20000)])
@kinds
def test_wide_rows(kind, shape, rms, device):
    """On CUDA both ends of what one launch does, with rows in several bands and in a part of one."""
    check(norm_arguments(shape, torch.bfloat16, device, rms), True, kind, (True, True))
    check(norm_arguments(shape, torch.float16, device, rms, False, torch.float32), False, kind, (True, False))


@kinds
def test_layouts_do_not_matter(kind, device):
    x, residual, gamma, *rest = norm_arguments((33, 72), torch.bfloat16, device, False)
    for (name, x_laid), (_, residual_laid) in zip(layouts(x), layouts(residual), strict=True):
        check((x_laid, residual_laid, gamma, *rest), False, kind, (True, True), name)
    odd = torch.empty(73, dtype=gamma.dtype, device=device)[1:].copy_(gamma)
    check((x, residual, odd, *rest), False, kind, (True, True), "gamma at an odd address")


@kinds
def test_y_is_there_when_it_is_wanted(kind, device):
    arguments = norm_arguments((20, 48), torch.bfloat16, device, True)
    want, *_ = _C.normalization_fwd(*arguments, False)
    with_y, y, *_ = _C.normalization_fwd_quantize(*arguments, False, quantizer_of(kind, device), True, True, True)
    without, *_ = _C.normalization_fwd_quantize(*arguments, False, quantizer_of(kind, device), True, True, False)
    assert_same_bits(y, want)
    assert_same_quantized(with_y, without)


@kinds
def test_no_rows(kind, device):
    for rms in (False, True):
        check(norm_arguments((0, 40), torch.bfloat16, device, rms), False, kind, (True, True))


@kinds
def test_nan_and_inf_are_kept(kind, device):
    x, *rest = norm_arguments((130, 136), torch.bfloat16, device, True)
    x[3, 7], x[129, 0] = torch.nan, torch.inf
    if kind != "delayed":  # whose amax here is no number to compare
        check((x, *rest), False, kind, (True, True))
    got, *_ = _C.normalization_fwd_quantize(x, *rest, False, quantizer_of(kind, device), True, False, False)
    assert (got.rowwise[3] & 0x7F == 0x7F).all()


def test_refused_by_name(device):
    x, residual, gamma, beta, eps, rms = norm_arguments((4, 16), torch.bfloat16, device, False)
    current = quantizer_of("current", device)
    with refused(ValueError, "quantize", "'quantizer'"):
        none = _C.Quantizer("none", False, False, 0.0)
        _C.normalization_fwd_quantize(x, residual, gamma, beta, eps, rms, False, none, True, True, False)
    with refused(ValueError, "normalization", "'gamma'"):
        _C.normalization_fwd_quantize(x, residual, gamma[:-1], beta, eps, rms, False, current, True, True, False)
    _, h, mean, rstd = _C.normalization_fwd(x, residual, gamma, beta, eps, rms, False)
    with refused(ValueError, "quantize", "'used_scales'"):
        _C.normalization_again_quantize(h, gamma, beta, mean, rstd, rms, False, current.spec, None, True, True)
    with refused(ValueError, "normalization", "'rstd'"):
        used = torch.ones(2, device=device)
        _C.normalization_again_quantize(h, gamma, beta, mean, rstd[:-1], rms, False, current.spec, used, True, True)
