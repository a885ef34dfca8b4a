# Shared by the tests of offload: small stacks of layers, a training step with and without a context, a threshold that
# offloads small tensors, and the peak device memory of a run.
import gc

import pytest
import torch

from transformer_engine.pytorch.cpu_offload import layer as offload_layer


@pytest.fixture
def small(monkeypatch):
    """Tensors of 64 elements and more are offloaded."""
    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 64)


def forward(layers, x, context=None, sync=None):
    for layer in layers:
        if context is None:
            x = layer(x)
            continue
        with context:
            x = layer(x)
        x = sync(x)
    return x


def step(layers, inputs, context=None, sync=None, twice=False):
    """Outputs and gradients of a step over some microbatches, all of them in flight before the first backward."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    torch.manual_seed(5)  # dropout
    given = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = [forward(layers, x, context, sync) for x in given]
    for y in outputs:
        y.backward(torch.ones_like(y), retain_graph=twice)
    for y in outputs if twice else ():
        y.backward(torch.ones_like(y))
    results = [y.detach() for y in outputs] + [x.grad for x in given]
    return results + [p.grad for layer in layers for p in layer.parameters()]


def states(synchronizer):
    """The states of the layers of the newest step."""
    return [layer.state for layer in list(synchronizer.steps())[-1].layers]


def peak_bytes(run, device):
    """The peak of allocated bytes while run() runs, above those at its start: requested bytes, since a cached block may
    be up to 1 MiB larger. On a CPU torch's profiler reports each allocation; the host memory of offloaded tensors is
    not allocated by torch."""
    if device == "cuda":
        gc.collect()  # tensors in circles that earlier tests left would be freed during the run
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # checks for memory that other streams have released
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()["requested_bytes.all.current"]
        run()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - start
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run()
    sizes = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for _, size in sorted(sizes, key=lambda entry: entry[0]):
        alive += size
        most = max(most, alive)
    return most
