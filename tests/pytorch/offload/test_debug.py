# Debug mode: host memory that was given up holds NaN in every dtype, until it is used again.
import ctypes

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te

from .cases import forward, small  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")
COPY = 2  # te_offload_step_kind


def run(debug, device):
    """(the context, the host memory of the first copy after the step, the offloaded tensor)"""
    layers = [torch.nn.Linear(16, 16, device=device) for _ in range(2)]
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    context.offload_synchronizer.engines.options["trace"] = True
    context.offload_synchronizer.debug = debug
    x = randn(16, 16, device=device, requires_grad=True)
    forward(layers, x, context, sync).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    ((_, engine),) = context.offload_synchronizer.engines
    to, size = next((row[5], row[6]) for row in engine.trace() if row[0] == COPY)
    assert context.offload_synchronizer.pinned_usage()["slots"] == 0 and size == x.nbytes
    host = (ctypes.c_ubyte * size).from_address(to)  # the arena still holds it
    return context, torch.frombuffer(host, dtype=torch.uint8).clone(), x


@pytest.mark.parametrize("debug", [False, True])
def test_memory_given_up_is_poisoned(debug, device):
    context, host, x = run(debug, device)
    assert context.offload_synchronizer.debug == debug
    if debug:
        assert (host == 0xFF).all()
        assert all(host.view(dtype).isnan().all() for dtype in (torch.float32, torch.bfloat16, torch.float16))
    else:
        assert_same_bits(host.view(torch.float32).view(16, 16), x.detach().cpu())


def test_it_is_set_before_the_first_step(device):
    context, _, _ = run(False, device)
    with refused(RuntimeError, "debug", "before the first step"):
        context.offload_synchronizer.debug = True
    with refused(TypeError, "debug", "often"):
        context.offload_synchronizer.debug = "often"


@pytest.mark.gpu
def test_a_replay_after_its_memory_was_released():
    """Its gradients are NaN, which shows that it reads released memory."""
    x = randn(16, 16, device="cuda")
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16, device="cuda"), torch.nn.Tanh()) for _ in range(2)]
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    context.offload_synchronizer.debug = True
    context.offload_synchronizer.reserve_pinned(1 << 20)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            return forward(self.layers, x, context, sync)

    whole = te.make_graphed_callables(
        Whole(),
        (torch.randn_like(x).requires_grad_(),),
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    y = whole(x.clone().requires_grad_())
    torch.cuda.synchronize()
    for _, engine in context.offload_synchronizer.engines:
        engine.release_captured()
    y.sum().backward()
    assert layers[0][0].weight.grad.isnan().any()
