# Tensors that stay under offload are watched as well: a parameter, a view of one or a tensor subclass that is written
# to in place after it was saved is named in the backward, as torch names it without hooks. sync_fn returns the tensor
# that it was given, so that writing to it is as without offload.
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te

from .cases import small  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def parameter(device):
    weight = torch.nn.Parameter(randn(16, 16, device=device))
    return weight, lambda x: x * weight


def view_of_parameter(device):
    weight = torch.nn.Parameter(randn(16, 16, device=device))
    return weight, lambda x: x * weight.T


def linear(device):
    layer = te.Linear(16, 16, device=device)
    return layer.weight, layer


def subclass(device):
    weight = randn(16, 16, device=device).as_subclass(Plain)
    return weight, lambda x: (x * weight).as_subclass(torch.Tensor)


KEPT = [parameter, view_of_parameter, linear, subclass]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
def test_what_stays_is_watched(make, written, device):
    weight, layer = make(device)
    x = randn(16, 16, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    with context:
        y = layer(x)
    y = sync(y)
    if not written:
        assert_same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
        return
    with torch.no_grad():
        weight.add_(1)
    with refused(RuntimeError, "needed for the gradient", "[16, 16]", "version", "in-place"):
        y.sum().backward()


def in_place(y):
    y += 1
    return y


def through_a_view(y):
    y[0].mul_(2)
    return y


def without_grad(y):
    with torch.no_grad():
        y.detach()[1:].add_(1)
    return y


def again(y):
    return y * 2


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("keeps_its_result", [False, True])
@pytest.mark.parametrize("write", [in_place, through_a_view, without_grad], ids=lambda write: write.__name__)
def test_what_sync_returns_is_written_to(write, keeps_its_result, left, device):
    """A layer that saves its result: torch's refusal if it may not be offloaded yet, and the right gradient if it was.
    A layer that does not: the same bits as without offload."""

    def layer(x):
        return torch.tanh(x * 3) if keeps_its_result else torch.tanh(x * 3) + x

    def run(context=None, sync=None):
        x = randn(16, 16, device=device, requires_grad=True)
        torch.manual_seed(0)
        if context is None:
            y = layer(x)
        else:
            with context:
                y = layer(x)
            y = sync(y)
            if left:
                next(context.offload_synchronizer.steps()).layers[0].release_activation_forward_gpu_memory()
        return x, y

    torch.manual_seed(1)
    x, y = run()
    whole = again(write(y.clone() if keeps_its_result else y))
    (expected,) = torch.autograd.grad(whole.sum(), x)
    torch.manual_seed(1)
    x, y = run(*te.get_cpu_offload_context(True, 1, 2))
    y = again(write(y))
    if keeps_its_result and not left:
        with refused(RuntimeError, "needed for the gradient", "version", "in-place"):
            y.sum().backward()
        return
    y.sum().backward()
    assert_same_bits(y, whole)
    assert_same_bits(x.grad, expected)


def itself(x):
    return x, x


def a_view(x):
    return x.view(-1), x


def its_result(x):
    y = x * 3
    return y, y


def a_view_of_its_result(x):
    y = x * 3
    return y.view(4, -1), y


@pytest.mark.parametrize("layer", [itself, a_view, its_result, a_view_of_its_result], ids=lambda layer: layer.__name__)
def test_others_hold_what_sync_returns(layer, device):
    """A skipped layer, or a list of hidden states: code that holds the tensor sees writes to it, and so does the
    graph."""

    def run(context, sync):
        x = torch.ones(8, 16, device=device, requires_grad=True)
        with context:
            y, held = layer(x * 3)
        y = sync(y)
        y.mul_(2)
        (y.view(8, 16) + held * held).sum().backward()
        return held.detach(), x.grad

    for got, wanted in zip(
        run(*te.get_cpu_offload_context(True, 1, 2)), run(*te.get_cpu_offload_context(False)), strict=True
    ):
        assert_same_bits(got, wanted)


def test_sync_returns_what_it_is_given(device):
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    leaf = randn(8, 16, device=device, requires_grad=True)
    with context:
        y = leaf
    assert sync(y) is leaf
    with refused(RuntimeError, "leaf", "in-place"):  # torch's own error, as without offload
        sync(leaf).mul_(2)
    with context:
        y = leaf * 2
    assert sync(y) is y


@pytest.mark.parametrize("view", [False, True])
def test_the_schedule_where_results_are_written_to(view, device):
    """A residual that is added in place: layers keep their order, and each is reloaded when the backward reaches it."""
    n, k = 4, 2
    context, sync = te.get_cpu_offload_context(True, k, n)
    numbers, reached, synchronizer = [], [], context.offload_synchronizer
    bwd_step = synchronizer.bwd_step
    synchronizer.bwd_step = lambda number: (reached.append(int(number)), bwd_step(number))
    x = randn(8, 16, device=device, requires_grad=True)

    def run(context=None, sync=None):
        y = x
        for _ in range(n):
            if context is None:
                h = torch.sin(y) + y * y
                h = h.view(16, 8) if view else h
            else:
                with context:
                    numbers.append(int(synchronizer.number))
                    h = torch.sin(y) + y * y
                    h = h.view(16, 8) if view else h
                h = sync(h)
            h += 1
            y = h.view(8, 16) if view else h
        return torch.autograd.grad(y.sum(), x)[0]

    assert_same_bits(run(context, sync), run())
    assert numbers == [0, 1, 2, 3] and reached == [3, 2, 1, 0]
    assert synchronizer.pinned_usage()["slots"] == 0
