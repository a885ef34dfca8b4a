# What stays under offload is watched as well: a parameter, a view of one or a tensor subclass that is written to in
# place after it was saved is named in the backward, as torch names it without hooks. Mutant: keeping no version (Kept
# in cpu_offload/layer.py) turns test_what_stays_is_watched red. So is what sync_fn returns, which shares its memory
# with what the layer kept. Mutant: handing it on as it is (_EndOfLayer in cpu_offload/context.py).
import pytest
import torch
from offload_cases import small  # noqa: F401
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te

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
    with refused(RuntimeError, "needed for the gradient", "[16, 16]", "version", "in place"):
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
    """A layer that keeps its result: torch's refusal where the copy may not have left yet, and the right gradient where
    it had. One that does not: the same bits as without offload."""

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
        with refused(RuntimeError, "needed for the gradient", "version", "in place"):
            y.sum().backward()
        return
    y.sum().backward()
    assert_same_bits(y, whole)
    assert_same_bits(x.grad, expected)
