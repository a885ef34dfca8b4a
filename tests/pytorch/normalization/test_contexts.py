# normalization in PyTorch's contexts: opcheck, compile, autocast, saved tensors, unwanted gradients, threads.
# test_normalization.py checks its values.
import itertools

import pytest
import torch
from support import addresses, assert_same_bits, assert_within, in_threads, randn, refused, saved_tensors, wide
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import normalization

from .cases import BOTH, EPS, Inputs, draw

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
    stances = ("default", "fail_on_recompile")  # the second shape must fit the graph of the first
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
def test_unwanted_gradients_change_no_others(rms, device):
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


def test_backward_reads_the_tensors_that_hooks_unpack(device):
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
