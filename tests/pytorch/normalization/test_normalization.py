# normalization, the functional op: LayerNorm and RMSNorm, plain and with the fused residual, against float64 formulas
# and their autograd gradients; and what holds for each (layouts, compile, autocast, what is saved, errors).
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from support import DTYPES, U32, assert_same_bits, assert_within, layouts, randn, refused, rounding, wide

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import normalization

from .cases import BOTH, EPS, Inputs, draw

# No rows, one element, odd (elementwise access on the GPU), one dimension, three, a warp's and a block's rows.
SHAPES = ((0, 8), (1, 1), (3, 5), (7,), (2, 3, 33), (9, 128), (5, 4096), (2, 20000))


def norm64(h, gamma, beta, rms, zero_centered):
    mean = 0.0 if rms else h.mean(-1, keepdim=True)
    rstd = ((h - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (h - mean) * rstd * (gamma + 1 if zero_centered else gamma)
    return y if beta is None else y + beta


@dataclass
class Errors:
    """Of the statistics and of n = (h - mean) rstd, in float64.

    u = 2^-24. A row's sum passes through at most 40 + hidden / 256 additions on either path (C++ test: row_depth), so
    mean is within (depth + 2) u mean|h| =: d. The variance around such a mean is var + d^2; its terms and sum add
    (depth + 6) u in proportion, 1 / sqrt halves that and adds 6 u: rstd is within r of itself. The difference and the
    product round once more each."""

    n: torch.Tensor
    d: torch.Tensor
    r: torch.Tensor
    rstd: torch.Tensor
    mean: torch.Tensor
    depth: float

    @property
    def of_n(self):
        return self.n.abs() * (self.r + 2 * U32) + self.rstd * self.d


def errors_of(h, rms):
    depth = 40 + h.shape[-1] / 256
    mean = torch.zeros_like(h[..., :1]) if rms else h.mean(-1, keepdim=True)
    var = (h - mean).square().mean(-1, keepdim=True)
    d = mean.abs() * 0 if rms else (depth + 2) * U32 * h.abs().mean(-1, keepdim=True)
    r = 0.5 * ((depth + 6) * U32 + d.square() / (var + EPS)) + 6 * U32
    rstd = (var + EPS).rsqrt()
    return Errors((h - mean) * rstd, d, r, rstd, mean, depth)


def rows_and(h):
    """h as [rows, hidden]."""
    return h.reshape(-1, h.shape[-1])


def gradient_bounds(i, h64, dy, dh):
    """(dx, dgamma, dbeta) bounds from float64 values; the three sums of the header's formula, term by term."""
    e = errors_of(h64, i.rms)
    g = wide(i.gamma) + i.zero_centered
    w = dy * g
    mean_w = torch.zeros_like(e.mean) if i.rms else w.mean(-1, keepdim=True)
    mean_wn = (w * e.n).mean(-1, keepdim=True)
    error_w = (e.depth + 4) * U32 * w.abs().mean(-1, keepdim=True) * (not i.rms)
    error_wn = (w.abs() * e.of_n).mean(-1, keepdim=True) + (e.depth + 7) * U32 * (w * e.n).abs().mean(-1, keepdim=True)
    terms = w.abs() + mean_w.abs() + (e.n * mean_wn).abs()
    norm_grad = (w - mean_w - e.n * mean_wn) * e.rstd
    dx = e.rstd * (error_w + e.n.abs() * error_wn + e.of_n * mean_wn.abs() + 6 * U32 * terms)
    dx = dx + norm_grad.abs() * (e.r + 2 * U32) + 2 * U32 * (norm_grad.abs() + (norm_grad + dh).abs())
    rows = rows_and(h64).shape[0]
    dgamma = rows_and(dy.abs() * e.of_n + (rows + 4) * U32 * (dy * e.n).abs()).sum(
        0
    )  # in whatever order rows are added
    dbeta = (rows + 1) * U32 * rows_and(dy.abs()).sum(0)
    return dx * 1.01, dgamma * 1.01, dbeta * 1.01  # products of two errors


def variants(rms):
    for residual, zero_centered, wide_gamma in itertools.product((False, True), repeat=3):
        yield {"rms": rms, "residual": residual, "zero_centered": zero_centered}, wide_gamma
    if not rms:
        yield {"rms": rms, "beta": False}, False


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_match_the_oracle(dtype, rms, device):
    for shape in SHAPES:
        for options, wide_gamma in variants(rms):
            i = draw(shape, dtype, device, gamma_dtype=torch.float32 if wide_gamma else None, **options)
            y, h = i.run()
            what = f"{shape} {options} {wide_gamma}"
            assert (y.dtype, y.device, y.shape) == (i.x.dtype, i.x.device, i.x.shape)
            if i.residual is None:
                assert h.numel() == 0
                h = i.x
            else:
                assert_same_bits(h, (i.x.float() + i.residual.float()).to(dtype), what)
            h64, gamma, beta = wide(h), wide(i.gamma), None if i.beta is None else wide(i.beta)
            want = norm64(h64, gamma, beta, rms, i.zero_centered)
            e, g = errors_of(h64, rms), (gamma + i.zero_centered).abs()
            bound = g * (e.of_n + 3 * U32 * e.n.abs()) + 2 * U32 * want.abs()
            assert_within(y, want, rounding(want.abs() + bound, dtype) + bound, what)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_match_the_oracle(dtype, rms, device):
    for shape in SHAPES:
        i = draw(shape, dtype, device, rms=rms, shift=3.0)
        _, _, mean, rstd = _C.normalization_fwd(i.x, None, i.gamma, i.beta, EPS, rms, False)
        e = errors_of(wide(i.x), rms)
        assert mean.dtype == rstd.dtype == torch.float32
        assert_within(rstd, e.rstd.flatten(), (e.r * e.rstd).flatten(), f"rstd {shape}")
        if rms:
            assert mean.numel() == 0
        else:
            assert_within(mean, e.mean.flatten(), e.d.flatten(), f"mean {shape}")


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_match_the_oracle(dtype, rms, device):
    for shape in SHAPES:
        for options, wide_gamma in variants(rms):
            i = draw(shape, dtype, device, gamma_dtype=torch.float32 if wide_gamma else None, **options)
            dy = randn(*shape, dtype=dtype, device=device)
            dh = randn(*shape, dtype=dtype, device=device) if i.residual is not None else None
            h = i.x if i.residual is None else i.run()[1]
            h64, gamma64 = wide(h).requires_grad_(), wide(i.gamma).requires_grad_()
            beta64 = None if i.beta is None else wide(i.beta).requires_grad_()
            y64 = norm64(h64, gamma64, beta64, rms, i.zero_centered)
            leaves = [t for t in (h64, gamma64, beta64) if t is not None]
            dx, dgamma, *dbeta = torch.autograd.grad(y64, leaves, wide(dy))
            through_h = torch.zeros_like(dx) if dh is None else wide(dh)
            bounds = gradient_bounds(i, h64.detach(), wide(dy), through_h)
            got = list(i.gradients(dy, dh))
            what, dx = f"{shape} {options} {wide_gamma}", dx + through_h
            if i.residual is not None:
                assert_same_bits(got[0], got.pop(1), what)
            assert_within(got[0], dx, rounding(dx.abs() + bounds[0], dtype) + bounds[0], f"dx {what}")
            for name, value, want, bound in zip(
                ("dgamma", "dbeta"), got[1:], (dgamma, *dbeta), bounds[1:], strict=False
            ):
                like = i.gamma.dtype
                assert value.dtype == like
                assert_within(value, want, rounding(want.abs() + bound, like) + bound, f"{name} {what}")


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_changes_no_bits(dtype, rms, device):
    for shape in ((5, 24), (2, 3, 40)):
        i = draw(shape, dtype, device, rms=rms, residual=True)
        dy, dh = randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)
        (y, h), grads = i.run(), i.gradients(dy, dh)
        for (name, x), (_, residual) in zip(layouts(i.x), layouts(i.residual), strict=True):
            if name == "odd":
                continue  # elementwise access adds in another order: test_odd_addresses_stay_within_the_bound
            other = Inputs(x.requires_grad_(), i.gamma, i.beta, residual.requires_grad_(), rms)
            other_y, other_h = other.run()
            if name != "pitch" or device == "cpu":  # a pitch of last + 3 is not aligned either
                assert_same_bits(other_y, y, name)
                for got, want in zip(other.gradients(dy, dh), grads, strict=True):
                    assert_same_bits(got, want, name)
                    assert got.is_contiguous()
            assert_same_bits(other_h, h, name)
        if device == "cpu":
            for (name, other_dy), (_, other_dh) in zip(layouts(dy), layouts(dh), strict=True):
                for got, want in zip(i.gradients(other_dy, other_dh), grads, strict=True):
                    assert_same_bits(got, want, name)


@BOTH
def test_odd_addresses_stay_within_the_bound(rms, device):
    i = draw((6, 64), torch.float32, device, rms=rms)
    want = norm64(wide(i.x), wide(i.gamma), None if rms else wide(i.beta), rms, False)
    e = errors_of(wide(i.x), rms)
    bound = wide(i.gamma).abs() * (e.of_n + 3 * U32 * e.n.abs()) + 3 * U32 * want.abs()
    for name, x in layouts(i.x):
        assert_within(i.run(x=x)[0], want, bound, name)


@BOTH
def test_stride_0_gradient(rms, device):
    i = draw((3, 33), torch.float32, device, rms=rms)
    i.run()[0].sum().backward()
    ones = torch.ones(3, 33, device=device)
    for leaf, want in zip(i.leaves(), i.gradients(ones), strict=True):
        assert_same_bits(leaf.grad, want)


@BOTH
def test_special_values_spread_as_torch_spreads_them(rms, device):
    twin = torch.nn.functional.rms_norm if rms else torch.nn.functional.layer_norm
    for dtype, bad in itertools.product(DTYPES, (math.nan, math.inf, -math.inf)):
        i = draw((3, 40), dtype, device, rms=rms)
        clean = i.run()[0]
        with torch.no_grad():
            i.x[1, 7] = bad
        y = i.run()[0]
        beta = () if rms else (i.beta,)
        want = twin(i.x, (40,), i.gamma, *beta, eps=EPS)
        assert torch.equal(y.isnan(), want.isnan()), f"{dtype} {bad}"
        assert_same_bits(y[::2].contiguous(), clean[::2].contiguous())
        dx = i.gradients(torch.ones_like(y))[0]
        assert dx[1].isnan().all() and not dx[::2].isnan().any()


@BOTH
def test_same_bits_every_time(rms, device):
    """More rows than the rows' parts, wide and narrow, on whatever threads and SMs there are."""
    for shape in ((3000, 64), (700, 1024), (300, 33)):
        i = draw(shape, torch.bfloat16, device, rms=rms, residual=True)
        dy = randn(*shape, dtype=torch.bfloat16, device=device)
        first, again = i.gradients(dy, dy), i.gradients(dy, dy)
        for one, other in zip(first, again, strict=True):
            assert_same_bits(other, one, str(shape))


# ---- errors ----


def bad_calls(device):
    x, g = torch.ones(3, 8, device=device), torch.ones(8, device=device)

    def norm(x=x, gamma=g, beta=None, rms=False, **options):
        return lambda: normalization(x, gamma, beta, rms=rms, **options)

    def backward(dy=x, residual_grad=None, rms=False, wanted=(True, True, True)):
        mean = torch.zeros(0 if rms else 3, device=device)
        return lambda: _C.normalization_bwd(dy, residual_grad, x, g, mean, x[:, 0].contiguous(), rms, False, wanted)

    wide_x = torch.ones(1, 65537, device=device)
    return (
        (ValueError, norm(torch.tensor(1.0, device=device)), ("'x'", "no dimensions")),
        (ValueError, norm(x[:, :7]), ("'gamma'", "[8]", "[7]")),
        (ValueError, norm(gamma=x), ("'gamma'", "[3, 8]", "[8]")),
        (ValueError, norm(beta=g[:7]), ("'beta'", "[7]", "[8]")),
        (ValueError, norm(beta=g, rms=True), ("'beta'", "RMSNorm has no beta")),
        (ValueError, norm(beta=g.half()), ("'beta'", "Half", "Float", ".to(dtype)")),
        (ValueError, norm(gamma=g.double()), ("'gamma'", "Double", "Float", ".to(dtype)")),
        (ValueError, norm(x.half(), g.bfloat16(), g), ("'beta'", "Float", "BFloat16", ".to(dtype)")),
        (ValueError, norm(x.double(), g.double()), ("'x'", "Double", "float32, float16 or bfloat16")),
        (ValueError, norm(x.int(), g), ("'x'", "int32", "float32, float16 or bfloat16")),
        (ValueError, norm(gamma=g.to("meta")), ("'gamma'", "meta")),
        (ValueError, norm(residual=x[:2]), ("'residual'", "[2, 8]", "[3, 8]")),
        (ValueError, norm(residual=x.half()), ("'residual'", "Half", "Float")),
        (ValueError, norm(eps=-1.0), ("'eps'", "-1", ">= 0")),
        (ValueError, norm(x[:, :0], g[:0]), ("'x'", "[3, 0]", "at least 1")),
        (NotImplementedError, norm(wide_x, wide_x[0]), ("'x'", "[1, 65537]", "65536")),
        (ValueError, backward(x[:2]), ("'dy'", "[2, 8]", "[3, 8]")),
        (ValueError, backward(x.half()), ("'dy'", "Half", "Float", "cast")),
        (ValueError, backward(residual_grad=x[:, :4]), ("'residual_grad'", "[3, 4]", "[3, 8]")),
        (ValueError, backward(rms=True), ("'dbeta'", "RMSNorm has no beta")),
    )


def test_bad_input_is_named_and_harmless(device):
    i = draw((3, 10), torch.float32, device, rms=False)
    dy = randn(3, 10, device=device)
    y, grads = i.run()[0], i.gradients(dy)
    for exception, call, words in bad_calls(device):
        with refused(exception, "normalization", *words):
            call()
    assert_same_bits(i.run()[0], y)
    for got, want in zip(i.gradients(dy), grads, strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_tensor_on_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    i = draw((3, 16), torch.float32, "cuda:1", rms=True)
    dy = randn(3, 16, device="cuda:1")
    here = Inputs(*(t.detach().to("cuda:0").requires_grad_() for t in (i.x, i.gamma)), None, None, True)
    with torch.cuda.device(0):
        y, grads = i.run()[0], i.gradients(dy)
    assert y.device == i.x.device
    assert_same_bits(y.to("cuda:0"), here.run()[0])
    for got, want in zip(grads, here.gradients(dy.to("cuda:0")), strict=True):
        assert_same_bits(got.to("cuda:0"), want)
