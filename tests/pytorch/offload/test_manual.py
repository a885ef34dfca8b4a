# Manual synchronization where something is missing: pinned memory, the layer itself, or offload as a whole. A call does
# its work, or does nothing because nothing left, or raises an error that names the cause.
import pickle
import threading

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import (
    ManualOffloadSynchronizer,
    OffloadableLayerState,
    OffloadContext,
)
from transformer_engine.pytorch.cpu_offload.context import _sync_function

from .cases import forward, small, states, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")


def stack(device, n=3):
    return [te.LayerNormMLP(16, 32, device=device) for _ in range(n)]


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def test_exhausted_pinned_memory(device):
    """Each of the three calls accepts a layer that stayed on the device, in this step and in the next one."""
    layers, x = stack(device), randn(8, 16, device=device)
    expected = step(layers, [x])
    manual = ManualOffloadSynchronizer(3, pinned_limit=1)
    context = OffloadContext(manual)
    sync = _sync_function(context)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            x = forward(self.layers, x, context, sync)
            for call in (manual.start_offload_layer, manual.release_activation_forward_gpu_memory):
                for i in (0, 1):
                    call(i)
            assert states(manual) == ["not_offloaded"] * 3
            for i in (1, 0):
                manual.start_reload_layer(i)
            with refused(RuntimeError, "release_activation_forward_gpu_memory", "'not_offloaded'"):
                manual.release_activation_forward_gpu_memory(2)  # which no call offloads
            return x

    model = Model()
    with pytest.warns(RuntimeWarning, match="stays on the device.*pinned memory exhausted"):
        same(step([model], [x]), expected)
    same(step([model], [x]), expected)


def test_a_layer_that_stayed_may_leave_later(device):
    layer, x = OffloadableLayerState(), randn(8, 16, device=device)
    layer.no_pinned_memory = True
    saved = layer.push_tensor(x)
    layer.start_offload()
    assert not layer.no_pinned_memory
    layer.release_activation_forward_gpu_memory()
    layer.start_reload()
    assert_same_bits(layer.pop_tensor(saved), x)
    layer.no_pinned_memory = True
    layer.release_all_memory()
    assert not layer.no_pinned_memory


def test_a_layer_that_has_not_run(device):
    layers, x = stack(device), randn(8, 16, device=device, requires_grad=True)
    context, sync, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)
    y = forward(layers[:1], x, context, sync)
    for number in (1, 2):
        with refused(RuntimeError, "start_offload_layer", f"layer {number} has not run", "layer 0"):
            manual.start_offload_layer(number)
    manual.start_offload_layer(0)
    y = forward(layers[1:], y, context, sync)
    manual.start_offload_layer(1)
    assert states(manual) == ["offload_started", "offload_started", "not_offloaded"]
    assert manual.get_offloaded_total_size_mb() > 0
    y.sum().backward()


def test_a_release_that_the_engine_refuses(device):
    """Nothing is lost: the tensors are still on the device, and the call can be repeated."""
    layer, x = OffloadableLayerState(), randn(8, 16, device=device)
    saved = layer.push_tensor(x)
    layer.start_offload()

    class Refuses:
        state = "offload_started"

        def release(self):
            raise RuntimeError("not now")

    engine = layer._engine_layer
    layer._engine_layer = Refuses()
    with refused(RuntimeError, "not now"):
        layer.release_activation_forward_gpu_memory()
    layer._engine_layer = engine
    assert layer.state == "offload_started"
    assert_same_bits(layer.pop_tensor(saved), x)
    layer.release_activation_forward_gpu_memory()
    layer.start_reload()
    assert_same_bits(layer.pop_tensor(saved), x)


@pytest.mark.parametrize("manual", [False, True])
def test_a_context_that_is_not_enabled(manual, device):
    """It has all methods of an enabled one, and they change nothing."""
    layers, x = stack(device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync, *rest = te.get_cpu_offload_context(False, 1, 3, manual_synchronization=manual)
    for call in (context.disable, context.enable):
        call()
        same(step(layers, [x], context, sync), expected)
        with context:
            assert not te.cpu_offload.is_cpu_offload_enabled()
    synchronizer = context.offload_synchronizer
    assert rest == ([None] if manual else [])
    synchronizer.reserve_pinned(1 << 20, device)
    synchronizer.forget_step()
    synchronizer.release_pinned()
    assert synchronizer.get_offloaded_total_size_mb() == 0 and not any(synchronizer.pinned_usage().values())
    again = pickle.loads(pickle.dumps(context))
    with again, context, again:
        thread = threading.Thread(target=lambda: context.__enter__().__exit__(None, None, None))
        thread.start()
        thread.join()
    sample = x.clone().requires_grad_()
    wanted = layers[0](sample).detach()
    hooks = {"pre_warmup_hook": context.disable, "post_warmup_hook": context.enable}
    assert_same_bits(te.make_graphed_callables(layers[0], (sample,), **hooks)(sample), wanted)


def train(layers, x, context, sync, manual):
    """A step by its numbers: (output, gradient)."""
    x = x.clone().requires_grad_()
    y = by_number(layers, x, context, sync, manual)
    for i in reversed(range(len(layers))):
        manual.start_reload_layer(i)
    y.sum().backward()
    return y.detach(), x.grad


def by_number(layers, y, context, sync, manual):
    for i, layer in enumerate(layers):
        y = forward([layer], y, context, sync)
        manual.start_offload_layer(i)
        manual.release_activation_forward_gpu_memory(i)
    return y


@pytest.mark.parametrize("where", ["no_grad", "inference", "disabled"])
def test_an_evaluation_with_the_same_forward(where, device):
    """Before the first step, between steps, and between a forward and its backward."""
    layers, x = stack(device), randn(8, 16, device=device)
    context, sync, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)

    def evaluate():
        context.disable() if where == "disabled" else None
        mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "disabled": torch.enable_grad}[where]
        with mode():
            y = by_number(layers, x, context, sync, manual)
        context.enable()
        return y.detach().clone()

    wanted = evaluate()
    expected = train(layers, x, context, sync, manual)
    assert_same_bits(expected[0], wanted)
    for _ in range(2):
        assert_same_bits(evaluate(), wanted)
    same(train(layers, x, context, sync, manual), expected)
    given = x.clone().requires_grad_()
    y = forward(layers, given, context, sync)
    manual.start_offload_layer(0)
    before = states(manual)
    assert_same_bits(evaluate(), wanted)
    assert states(manual) == before == ["offload_started", "not_offloaded", "not_offloaded"]
    manual.release_activation_forward_gpu_memory(0)
    with torch.no_grad():
        manual.start_reload_layer(0)
    assert states(manual)[0] == "reload_started"
    y.sum().backward()
    assert_same_bits(given.grad, expected[1])


def test_a_frozen_layer_does_not_come_back(device):
    """Nothing of it was offloaded, so no backward reads and ends it; the layer with its number in a later step does."""
    layers, x = stack(device), randn(8, 16, device=device)
    layers[0].requires_grad_(False)
    context, sync, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)
    y = by_number(layers, x, context, sync, manual)
    for _ in range(2):
        for i in (2, 1, 0):
            manual.start_reload_layer(i)
        assert states(manual) == ["offload_finished", "reload_started", "reload_started"]
        y.sum().backward(retain_graph=True)
        assert states(manual) == ["offload_finished"] * 3
    layers[0].requires_grad_(True)
    z = by_number(layers, x, context, sync, manual)  # while the first graph is alive
    manual.start_reload_layer(0)
    assert states(manual)[0] == "reload_started"
    z.sum().backward()


@pytest.mark.parametrize("frozen", [False, True], ids=["", "a frozen one before them"])
def test_the_oldest_step_goes_first(frozen, device):
    """Several steps have the layer in the required state; those without offloaded tensors are skipped."""
    layers, x = stack(device), randn(8, 16, device=device)
    context, sync, manual = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)
    expected = train(layers, x, context, sync, manual)
    graphs = []
    if frozen:
        layers[0].requires_grad_(False)
        graphs.append(forward(layers, x, context, sync))
        manual.start_offload_layer(0)
        layers[0].requires_grad_(True)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for given in inputs:
        graphs.append(forward(layers, given, context, sync))
        manual.start_offload_layer(0)
    first, second = (steps.layers[0] for steps in list(manual.steps())[-2:])

    def now():
        return [first.state.split("_")[1], second.state.split("_")[1]]

    assert now() == ["started", "started"]
    for wanted in (["finished", "started"], ["finished", "finished"]):
        manual.release_activation_forward_gpu_memory(0)
        assert now() == wanted
    for wanted in ("reload_started", "offload_finished"), ("reload_started", "reload_started"):
        manual.start_reload_layer(0)
        assert (first.state, second.state) == wanted
    for given, y in zip(inputs, graphs[-2:], strict=True):
        y.sum().backward()
        same([y.detach(), given.grad], expected)


@pytest.mark.parametrize("retain", [False, True])
def test_a_layer_that_only_another_result_needs(retain, device):
    """No backward runs through the argument of sync, so the step ends; a loss on another result still reads the
    layer."""
    layers, x = stack(device), randn(8, 16, device=device)
    wanted = x.clone().requires_grad_()
    layers[0](wanted).sum().backward()
    context, sync, manual = te.get_cpu_offload_context(
        True, None, 3, manual_synchronization=True, retain_pinned_cpu_buffers=retain
    )
    losses, inputs = [], [x.clone().requires_grad_() for _ in range(3)]
    for given in inputs:
        with context:
            y = layers[0](given)
        losses.append(y.sum())
        y = sync(y.detach())
        manual.start_offload_layer(0)
        manual.release_activation_forward_gpu_memory(0)
        assert manual.get_offloaded_total_size_mb() > 0
        manual.forget_step()
    for given, loss in zip(inputs, losses, strict=True):
        loss.backward()
        assert_same_bits(given.grad, wanted.grad)
