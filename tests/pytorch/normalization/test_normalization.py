# normalization, the functional op: LayerNorm and RMSNorm, plain and with the fused residual, against float64 formulas
# and their autograd gradients; and what holds for each (layouts, compile, autocast, what is saved, errors).
# Mutant: pass no residual_grad in NormalizationFamily::backward (csrc/normalization.cpp) and
# test_gradients_match_the_oracle turns red.
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from support import (
    DTYPES,
    U32,
    addresses,
    assert_same_bits,
    assert_within,
    in_threads,
    layouts,
    randn,
    refused,
    rounding,
    saved_tensors,
    wide,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import normalization

EPS = 1e-5
BOTH = pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])

# No rows, one element, odd (elementwise access on the GPU), one dimension, three, a warp's and a block's rows.
SHAPES = ((0, 8), (1, 1), (3, 5), (7,), (2, 3, 33), (9, 128), (5, 4096), (2, 20000))


@dataclass
class Inputs:
    x: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor | None
    residual: torch.Tensor | None
    rms: bool
    zero_centered: bool = False

    def run(self, **changed):
        kept = {"x": self.x, "gamma": self.gamma, "beta": self.beta, "residual": self.residual} | changed
        return normalization(**kept, rms=self.rms, eps=EPS, zero_centered_gamma=self.zero_centered)

    def leaves(self):
        return [t for t in (self.x, self.residual, self.gamma, self.beta) if t is not None]

    def gradients(self, dy, dh=None):
        """Of (x, residual, gamma, beta), those that are there."""
        outputs = self.run()
        grads = (dy, dh) if self.residual is not None and dh is not None else (dy,)
        return torch.autograd.grad(outputs[: len(grads)], self.leaves(), grads)

    def copy(self):
        parts = [None if t is None else t.detach().clone().requires_grad_() for t in (self.x, self.gamma, self.beta)]
        residual = None if self.residual is None else self.residual.detach().clone().requires_grad_()
        return Inputs(*parts, residual, self.rms, self.zero_centered)


def draw(shape, dtype, device, *, rms, residual=False, zero_centered=False, gamma_dtype=None, beta=True, shift=0.5):
    def make(*size, like=dtype, offset=0.0):
        return (torch.randn(*size) + offset).to(like).to(device).requires_grad_()

    like = gamma_dtype or dtype
    return Inputs(
        make(*shape, offset=shift),
        make(shape[-1], like=like),
        make(shape[-1], like=like) if beta and not rms else None,
        make(*shape) if residual else None,
        rms,
        zero_centered,
    )


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


# ---- PyTorch around it ----


@BOTH
def test_opcheck(rms, device):
    for shape, residual in (((3, 6), False), ((2, 3, 8), True), ((0, 8), True)):
        i = draw(shape, torch.float32, device, rms=rms, residual=residual)
        args = (i.x, i.residual, i.gamma, i.beta, EPS, rms, True)
        torch.library.opcheck(torch.ops.te.normalization.default, args)
        plain = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in args)
        torch.library.opcheck(torch.ops.te.normalization_fwd.default, plain)
        x, residual_grad, gamma, _, _, _, _ = plain
        _, _, mean, rstd = torch.ops.te.normalization_fwd(*plain)
        for wanted in ([True, True, not rms], [False, True, False], [True, False, False]):
            grad = residual_grad if wanted[0] else None
            backward = (torch.ones_like(x), grad, x, gamma, mean, rstd, rms, True, wanted)
            torch.library.opcheck(torch.ops.te.normalization_bwd.default, backward)


@pytest.mark.parametrize("residual", [False, True])
@BOTH
def test_compiled_bits_equal_eager(rms, residual, device):
    def call(x, gamma, beta, residual):
        return normalization(x, gamma, beta, rms=rms, eps=EPS, residual=residual)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    stances = ("default", "fail_on_recompile")  # the second shape must fit the first one's graph
    for shape, stance in zip(((3, 10), (5, 28)), stances, strict=True):
        i = draw(shape, torch.float32, device, rms=rms, residual=residual)
        dy, dh = randn(*shape, device=device), randn(*shape, device=device)
        with torch.compiler.set_stance(stance):
            y, h = compiled(i.x, i.gamma, i.beta, i.residual)
        want_y, want_h = i.run()
        assert_same_bits(y, want_y)
        assert_same_bits(h, want_h)
        outputs, grads = ((y, h), (dy, dh)) if residual else ((y,), (dy,))
        got = torch.autograd.grad(outputs, i.leaves(), grads)
        for value, want in zip(got, i.gradients(dy, dh), strict=True):
            assert_same_bits(value, want)


@pytest.mark.slow
def test_inductor_bits_equal_eager(device):
    i = draw((4, 16), torch.float32, device, rms=True, residual=True)
    y, h = torch.compile(lambda *a: normalization(a[0], a[1], rms=True, eps=EPS, residual=a[2]), fullgraph=True)(
        i.x, i.gamma, i.residual
    )
    assert_same_bits(y, i.run()[0])
    dy = randn(4, 16, device=device)
    for got, want in zip(torch.autograd.grad((y, h), i.leaves(), (dy, dy)), i.gradients(dy, dy), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
def test_autocast(rms, dtype, backend, device):
    i = draw((3, 10), torch.float32, device, rms=rms, residual=True)
    low = Inputs(
        *(t if t is None else t.detach().to(dtype).requires_grad_() for t in (i.x, i.gamma, i.beta)), None, rms
    )
    low.residual = i.residual.detach().to(dtype).requires_grad_()

    def call(x, gamma, beta, residual):
        return normalization(x, gamma, beta, rms=rms, eps=EPS, residual=residual)

    with torch.autocast(device, dtype=dtype):
        run = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
        y, h = run(i.x, i.gamma, i.beta, i.residual)
    for got, want in zip((y, h), low.run(), strict=True):
        assert_same_bits(got, want)
    dy = randn(3, 10, dtype=dtype, device=device)
    grads = torch.autograd.grad((y, h), i.leaves(), (dy, dy))
    for got, want in zip(grads, low.gradients(dy, dy), strict=True):
        assert_same_bits(got, want.float())


def test_fake_and_meta_tensors_get_shapes():
    with FakeTensorMode():
        gamma = torch.empty(8)
        y, h = normalization(torch.empty(2, 3, 8), gamma, rms=True, residual=torch.empty(2, 3, 8))
        assert y.shape == h.shape == (2, 3, 8)
        assert normalization(torch.empty(3, 8), gamma, gamma, rms=False)[1].shape == (0,)
    gamma = torch.empty(2, device="meta")
    assert normalization(torch.empty(5, 2, device="meta"), gamma, rms=True)[0].shape == (5, 2)


@BOTH
def test_nothing_is_kept_without_a_graph(rms, device):
    i = draw((3, 10), torch.float32, device, rms=rms, residual=True)
    y, h = i.run()
    frozen = i.copy()
    for leaf in frozen.leaves():
        leaf.requires_grad_(False)
    with saved_tensors() as kept, torch.no_grad():
        no_grad = i.run()
    with saved_tensors() as kept_too:
        without = frozen.run()
    assert kept == kept_too == []
    with torch.inference_mode():
        inference = i.run()
    assert inference[0].is_inference()
    for other in (no_grad, without, inference):
        assert not other[0].requires_grad
        assert_same_bits(other[0], y)
        assert_same_bits(other[1], h)


@pytest.mark.parametrize("residual", [False, True])
@BOTH
def test_what_is_saved(rms, residual, device):
    """The norm's input, gamma and the statistics: 4 or 8 bytes a row beside tensors that live anyway."""
    i = draw((3, 10), torch.float32, device, rms=rms, residual=residual)
    with saved_tensors() as kept:
        y, h = i.run()
    source = h if residual else i.x
    statistics = [t for t in kept if t.data_ptr() not in addresses([source, i.gamma])]
    assert len(kept) == 2 + len(statistics)
    assert [t.shape for t in statistics] == [(3,)] * (1 if rms else 2)
    y, h = i.run()  # without hooks, which hide versions from autograd
    with torch.no_grad():
        (h if residual else i.x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones_like(y))


@BOTH
def test_gradients_nobody_wants_change_no_others(rms, device):
    i = draw((5, 24), torch.float32, device, rms=rms, residual=True)
    dy, dh = randn(5, 24, device=device), randn(5, 24, device=device)
    want = dict(zip(("x", "residual", "gamma", "beta"), i.gradients(dy, dh), strict=False))
    names = list(want)
    for wanted in itertools.product((False, True), repeat=len(names)):
        if not any(wanted):
            continue
        part = i.copy()
        for name, yes in zip(names, wanted, strict=True):
            getattr(part, name).requires_grad_(yes)
        y, h = part.run()
        outputs, grads = ((y, h), (dy, dh)) if h.requires_grad else ((y,), (dy,))
        torch.autograd.backward(outputs, grads)
        for name, yes in zip(names, wanted, strict=True):
            leaf = getattr(part, name)
            if yes:
                assert_same_bits(leaf.grad, want[name], name)
            else:
                assert leaf.grad is None


@BOTH
def test_a_gradient_at_one_output_alone(rms, device):
    i = draw((5, 24), torch.float32, device, rms=rms, residual=True)
    dy = randn(5, 24, device=device)
    zero = torch.zeros_like(dy)
    assert_same_bits(torch.autograd.grad(i.run()[1], i.x, dy)[0], dy)
    assert torch.autograd.grad(i.run()[1], i.gamma, dy, allow_unused=True)[0] is None
    for got, want in zip(i.gradients(dy), i.gradients(dy, zero), strict=True):
        assert_within(got, wide(want), 0.0)


def test_what_hooks_unpack_is_what_backward_reads(device):
    i, other = (draw((3, 10), torch.float32, device, rms=True) for _ in range(2))
    dy = randn(3, 10, device=device)
    swap = {i.x.data_ptr(): other.x.detach(), i.gamma.data_ptr(): other.gamma.detach()}
    rstd = _C.normalization_fwd(other.x, None, other.gamma, None, EPS, True, False)[3]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.data_ptr(), lambda key: swap.get(key, rstd)):
        y = i.run()[0]
    for got, want in zip(torch.autograd.grad(y, i.leaves(), dy), other.gradients(dy), strict=True):
        assert_same_bits(got, want)


def test_double_backward_is_refused_by_name(device):
    i = draw((3, 5), torch.float32, device, rms=True)
    with refused(NotImplementedError, "normalization", "double backward", "create_graph=True"):
        torch.autograd.grad(i.run()[0].sum(), i.x, create_graph=True)


def test_threads_get_the_same_bits(device):
    i = draw((200, 300), torch.bfloat16, device, rms=False, residual=True)
    dy = randn(200, 300, dtype=torch.bfloat16, device=device)
    want = i.gradients(dy, dy)
    for got in in_threads(6, lambda _: i.copy().gradients(dy, dy)):
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


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
        (ValueError, norm(eps=-1.0), ("'plan.eps'", "-1", ">= 0")),
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
