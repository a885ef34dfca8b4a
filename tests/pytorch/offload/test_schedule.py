# When layers leave and come back: the default schedule layer by layer, manual calls, several microbatches, faults.
import gc
import warnings
import weakref

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.cpu_offload import DefaultOffloadSynchronizer, OffloadContext
from transformer_engine.pytorch.cpu_offload.context import _sync_function

from .cases import forward, small, states, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")


class Layer(torch.nn.Module):
    """A plain torch module, without code for offload."""

    def __init__(self, device, width=24):
        super().__init__()
        self.up = torch.nn.Linear(16, width, device=device)
        self.down = torch.nn.Linear(width, 16, device=device)
        self.before = lambda: None
        self.up.register_forward_pre_hook(lambda *_: self.before())
        self.down.register_full_backward_pre_hook(lambda *_: self.before())

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def stack(n, device):
    return [Layer(device, width=24 + 8 * i) for i in range(n)]


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def with_limit(n, k, **options):
    context = OffloadContext(DefaultOffloadSynchronizer(n, k, **options))
    return context, _sync_function(context)


@pytest.mark.parametrize("n, k", [(1, 0), (2, 1), (4, 1), (4, 2), (5, 3), (6, 5)])
def test_the_default_schedule(n, k, device):
    layers, seen = stack(n, device), []
    context, sync = te.get_cpu_offload_context(True, k, n)
    for layer in layers:
        layer.before = lambda: seen.append(states(context.offload_synchronizer))
    step(layers, [randn(8, 16, device=device)], context, sync)
    out, back = seen[:n], seen[n:]
    for j, now in enumerate(out):  # while layer j runs
        for i in range(n):
            left = i < k and j >= n - k + i
            started = i < k and i < j
            assert now[i] == ("offload_finished" if left else "offload_started" if started else "not_offloaded"), (j, i)
    for j, now in zip(reversed(range(n)), back, strict=True):  # while the backward is in layer j
        for i in range(min(k, j + 1)):
            assert now[i] == ("reload_started" if j <= n - 1 - k + i else "offload_finished"), (j, i)
        on_device = sum(now[i] != "offload_finished" for i in range(j + 1))
        assert on_device <= n - k
    assert states(context.offload_synchronizer) == ["not_offloaded"] * n


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_same_bits_as_without(microbatches, twice, retain, device):
    layers = stack(4, device)
    inputs = [randn(8, 16, device=device) for _ in range(microbatches)]
    expected = step(layers, inputs, twice=twice)
    context, sync = te.get_cpu_offload_context(True, 2, 4, retain_pinned_cpu_buffers=retain)
    for _ in range(2):
        same(step(layers, inputs, context, sync, twice), expected)
        assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
        usage = context.offload_synchronizer.pinned_usage()
        assert usage["slots"] == (2 * microbatches if retain else 0)


def test_microbatches_of_1f1b(device):
    """Forwards and backwards of several microbatches take turns."""
    layers, inputs = stack(4, device), [randn(8, 16, device=device) for _ in range(4)]
    expected = step(layers, inputs)
    context, sync = te.get_cpu_offload_context(True, 3, 4)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    given, waiting = [x.clone().requires_grad_() for x in inputs], []
    for x in given:
        waiting.append(forward(layers, x, context, sync))
        if len(waiting) == 2:
            y = waiting.pop(0)
            y.backward(torch.ones_like(y))
    waiting[0].backward(torch.ones_like(waiting[0]))
    same([x.grad for x in given], expected[4:8])
    same([p.grad for layer in layers for p in layer.parameters()], expected[8:])


def test_manual_calls(device):
    layers, x = stack(3, device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    given = x.clone().requires_grad_()
    y = forward(layers, given, context, sync)
    assert states(manual) == ["not_offloaded"] * 3
    manual.start_offload_layer(0)
    manual.start_offload_layer(2)
    assert states(manual) == ["offload_started", "not_offloaded", "offload_started"]
    manual.release_activation_forward_gpu_memory(0)
    manual.release_activation_forward_gpu_memory(2)
    manual.start_reload_layer(2)
    assert states(manual) == ["offload_finished", "not_offloaded", "reload_started"]
    for call, state in (
        (manual.start_offload_layer, "offload_finished"),
        (manual.release_activation_forward_gpu_memory, "offload_finished"),
    ):
        with refused(RuntimeError, state, "layer"):
            call(0)
    with refused(RuntimeError, "start_reload", "not_offloaded"):
        manual.start_reload_layer(1)
    for layer_id in (-1, 3, "0"):
        with refused(ValueError, "start_reload_layer", "layer_id", repr(layer_id), "0 to 2"):
            manual.start_reload_layer(layer_id)
    y.backward(torch.ones_like(y))  # layer 0 is reloaded when its backward reads it
    same([y.detach(), given.grad, *(p.grad for layer in layers for p in layer.parameters())], expected)


def test_manual_calls_before_a_forward_and_when_disabled():
    _, _, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)
    with refused(RuntimeError, "start_offload_layer", "no forward"):
        manual.start_offload_layer(0)
    _, sync, off = te.get_cpu_offload_context(False, manual_synchronization=True)
    assert off is None
    assert sync("anything") == "anything"


def test_backward_before_anything_has_left(device):
    """A backward may start at any time: here after the first layers of a longer model."""
    layers, x = stack(2, device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 4, 6)
    same(step(layers, [x], context, sync), expected)
    assert not context.offload_synchronizer.layer_open
    same(step(layers, [x], context, sync), expected)  # and the next layer is the first one again
    assert states(context.offload_synchronizer) == ["not_offloaded"] * 6


def test_a_layer_that_torch_takes_no_hooks_for(device):
    layers, x = stack(4, device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 2, 4)
    none = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    with none, pytest.raises(RuntimeError, match="none here"), context:
        pass
    assert not context.offload_synchronizer.layer_open and not context.inside_context
    same(step(layers, [x], context, sync), expected)  # and the next layer is the first one


def test_an_exception_in_a_layer(device):
    layers, x = stack(4, device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 2, 4)

    def fail():
        raise ArithmeticError("in the layer")

    layers[2].before = fail
    with pytest.raises(ArithmeticError):
        step(layers, [x], context, sync)
    assert not cpu_offload.is_cpu_offload_enabled()
    layers[2].before = lambda: None
    begun = []
    layers[0].before = lambda: begun.append(int(context.offload_synchronizer.number))
    same(step(layers, [x], context, sync), expected)
    assert begun[0] == 0  # a new step
    assert context.offload_synchronizer.pinned_usage()["slots"] == 0


def test_exhausted_pinned_memory_warns_and_the_step_continues(device):
    layers, x = stack(4, device), randn(20000, 16, device=device)
    expected = step(layers, [x])
    context, sync = with_limit(4, 2, pinned_limit=8 << 20)
    with pytest.warns(RuntimeWarning, match=r"stays on the device.*pinned memory exhausted: \d+ bytes"):
        same(step(layers, [x], context, sync), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        same(step(layers, [x], context, sync), expected)


def test_nothing_grows_and_nothing_needs_the_collector(device):
    layers, x = stack(4, device), randn(8, 16, device=device)
    context, sync = te.get_cpu_offload_context(True, 2, 4)
    gc.collect()
    gc.disable()
    try:
        figures = []
        for _ in range(50):
            given = x.clone().requires_grad_()
            y = forward(layers, given, context, sync)
            graph = weakref.ref(context.offload_synchronizer.number.step.layers[0])
            y.sum().backward()
            memory = torch.cuda.memory_allocated() if device == "cuda" else 0
            figures.append((context.offload_synchronizer.pinned_usage()["reserved"], memory))
            del y, given
        assert set(figures[2:]) == {figures[2]}
        context.offload_synchronizer.forget_step()
        assert graph() is None
        # A graph without a backward is freed as a whole.
        y = forward(layers, x.clone().requires_grad_(), context, sync)
        assert context.offload_synchronizer.pinned_usage()["slots"] == 2
        del y
        assert context.offload_synchronizer.pinned_usage()["slots"] == 0
    finally:
        gc.enable()


def test_where_nothing_is_recorded_nothing_happens(device):
    layers, x = stack(2, device), randn(8, 16, device=device)
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    with torch.no_grad():
        forward(layers, x, context, sync)
    assert not list(context.offload_synchronizer.steps())
    context.disable()
    step(layers, [x], context, sync)
    assert not list(context.offload_synchronizer.steps())
    context.enable()
    step(layers, [x], context, sync)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0


def test_inside_and_outside(device):
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    assert not cpu_offload.is_cpu_offload_enabled()
    with context:
        assert cpu_offload.is_cpu_offload_enabled()
        with torch.no_grad(), context:
            assert cpu_offload.is_cpu_offload_enabled()
    assert not cpu_offload.is_cpu_offload_enabled()
    with refused(TypeError, "sync_fn", "tuple"):
        sync((1, 2))
    cpu_offload.start_offload(torch.ones(3, device=device))  # outside it does nothing
    with refused(TypeError, "start_offload", "int"):
        cpu_offload.start_offload(3)


def test_a_tensor_that_is_ready_early(device):
    """start_offload() changes only when a copy may start; the layer may run in several parts."""
    layers, x = stack(3, device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 2, 3)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    given = x.clone().requires_grad_()
    y = given
    for layer in layers:
        with context:
            cpu_offload.start_offload(y, None, offload_base_tensor=True)
            up = layer.up(y)
        with context:
            y = y + layer.down(torch.nn.functional.gelu(up))
        y = sync(y)
    y.backward(torch.ones_like(y))
    same([y.detach(), given.grad, *(p.grad for layer in layers for p in layer.parameters())], expected)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"num_layers": 4, "model_layers": 4}, ValueError, ("num_layers", "model_layers", "4")),
        ({"num_layers": 5, "model_layers": 4}, ValueError, ("num_layers", "5")),
        ({"num_layers": -1, "model_layers": 4}, ValueError, ("num_layers", "-1")),
        ({"num_layers": None, "model_layers": 4}, ValueError, ("num_layers", "None")),
        ({"num_layers": 1, "model_layers": 0}, ValueError, ("model_layers", "0")),
        ({"offload_activations": False}, ValueError, ("offload_activations", "enabled=False")),
    ],
    ids=str,
)
def test_bad_arguments(options, error, words):
    with refused(error, "get_cpu_offload_context", *words):
        te.get_cpu_offload_context(True, **options)


def test_the_synchronizer_by_itself(device):
    synchronizer = DefaultOffloadSynchronizer(3, 1)
    with refused(ValueError, "DefaultOffloadSynchronizer", "3 of 3"):
        DefaultOffloadSynchronizer(3, 3)
    with refused(RuntimeError, "push_tensor", "fwd_step"):
        synchronizer.push_tensor(torch.ones(3))
    t = randn(100, device=device)
    assert synchronizer.fwd_step() == 0
    saved = synchronizer.push_tensor(t)
    numbers = [synchronizer.fwd_step(), synchronizer.fwd_step()]
    assert numbers == [1, 2]
    assert states(synchronizer)[0] == "offload_finished"
    synchronizer.bwd_step(2)
    synchronizer.bwd_step(numbers[0])
    assert states(synchronizer)[0] == "reload_started"
    assert_same_bits(synchronizer.pop_tensor(saved), t)
    synchronizer.finish_part_of_bwd()
    assert states(synchronizer)[0] == "offload_finished"
    assert_same_bits(synchronizer.pop_tensor(saved), t)  # reloaded once more
    with refused(ValueError, "bwd_step", 3):
        synchronizer.bwd_step(3)
