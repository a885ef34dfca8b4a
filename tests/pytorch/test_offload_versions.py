# What stays under offload is watched as well: a parameter, a view of one or a tensor subclass that is written to in
# place after it was saved is named in the backward, as torch names it without hooks. Mutant: keeping no version (Kept
# in cpu_offload/layer.py) turns test_what_stays_is_watched red.
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
