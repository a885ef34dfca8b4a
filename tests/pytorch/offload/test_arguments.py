# Wrong arguments of offload: values other than truth values, counts or streams, tensors of another layer, an exception
# where the layer was complete and not ended. Each is named, or gives the right bits.
import contextlib
import copy

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.cpu_offload import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadableLayerState,
)

from .cases import forward, small, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")

FLAGS = [
    "enabled",
    "offload_activations",
    "offload_weights",
    "double_buffering",
    "manual_synchronization",
    "retain_pinned_cpu_buffers",
]


@pytest.mark.parametrize("value", [3, "no", 1.0, torch.tensor(1)], ids=str)
@pytest.mark.parametrize("name", FLAGS)
def test_wrong_bools(name, value):
    with refused(TypeError, "get_cpu_offload_context", repr(name), repr(value), "True or False"):
        te.get_cpu_offload_context(**{"enabled": True, "num_layers": 1, "model_layers": 2, name: value})


def test_zeros_and_ones_of_a_command_line(device):
    context, _ = te.get_cpu_offload_context(1, 1, 2, retain_pinned_cpu_buffers=0, double_buffering=None)
    assert context.enabled
    assert te.get_cpu_offload_context(0, 1, 2)[1](7) == 7


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("value", [True, 1.0, "x", -1], ids=str)
@pytest.mark.parametrize("name", ["num_layers", "model_layers"])
def test_wrong_numbers_of_layers(name, value, manual):
    if (name, value, manual) == ("num_layers", -1, True):
        return  # no warning there
    options = {"num_layers": 1, "model_layers": 2, "manual_synchronization": manual, name: value}
    with refused(ValueError, "get_cpu_offload_context", repr(name), repr(value)):
        te.get_cpu_offload_context(True, **options)
    te.get_cpu_offload_context(False, **options)  # no layer is counted there


@pytest.mark.parametrize("stream", [5, "x", torch.device("cpu")], ids=str)
def test_wrong_streams(stream):
    made = [
        lambda: te.get_cpu_offload_context(True, 1, 2, offload_stream=stream),
        lambda: OffloadableLayerState(stream),
        lambda: DefaultOffloadSynchronizer(2, 1, False, stream),
        lambda: ManualOffloadSynchronizer(2, True, stream),
    ]
    for make in made:
        with refused(TypeError, "'offload_stream'", type(stream).__name__, "torch.cuda.Stream"):
            make()


def test_synchronizers_by_hand():
    for count in (True, 2.0, "2", 0):
        for make in (DefaultOffloadSynchronizer, ManualOffloadSynchronizer):
            with refused(ValueError, make.__name__, "num_layers", repr(count)):
                make(count, *([0] if make is DefaultOffloadSynchronizer else []))
    for count in (True, 1.0, None, -1):
        with refused(ValueError, "DefaultOffloadSynchronizer", repr(count), "of 3"):
            DefaultOffloadSynchronizer(3, count)
    for make in (DefaultOffloadSynchronizer, ManualOffloadSynchronizer, OffloadableLayerState):
        with refused(TypeError, make.__name__, "'retain_pinned_cpu_buffers'", "'x'"):
            make(*{DefaultOffloadSynchronizer: (2, 1), ManualOffloadSynchronizer: (2,)}.get(make, (None,)), "x")
    synchronizer, manual = DefaultOffloadSynchronizer(3, 1), ManualOffloadSynchronizer(3)
    for call in (lambda: synchronizer.bwd_step(0), lambda: manual.start_reload_layer(0)):
        with refused(RuntimeError, "no forward"):
            call()
    synchronizer.end_layer()  # nothing is open: nothing to end
    synchronizer.finish_part_of_bwd()
    saved = []  # a layer without offloaded tensors has nothing to reload
    for _ in range(3):
        manual.fwd_step()
        saved.append(manual.push_tensor(torch.zeros(2**18)))
    calls = [manual.start_offload_layer, manual.release_activation_forward_gpu_memory, manual.start_reload_layer]
    for call in [*calls, manual.bwd_step]:
        for layer_id in (3, -1, "0", 1.0, None, True):
            with refused(ValueError, call.__name__, "'layer_id'", repr(layer_id), "0 to 2"):
                call(layer_id)
    for call, wanted in zip(calls[1:], ("offload_started", "offload_finished"), strict=True):
        with refused(RuntimeError, "'not_offloaded'", wanted):
            call(1)
    for call in calls:
        call(1)
    with refused(RuntimeError, "start_offload", "'reload_started'", "'not_offloaded'"):
        calls[0](1)


@pytest.mark.parametrize("nbytes", [-1, 1.5, "x", True, 2**63], ids=str)
def test_pinned_memory_of_no_size(nbytes):
    with refused(ValueError, "reserve_pinned", "'nbytes'", repr(nbytes)):
        DefaultOffloadSynchronizer(2, 1).reserve_pinned(nbytes, "cpu")


def test_pinned_memory_of_no_device_and_of_no_machine():
    synchronizer = DefaultOffloadSynchronizer(2, 1)
    with refused(ValueError, "reserve_pinned", "'device'", "meta"):
        synchronizer.reserve_pinned(16, "meta")
    with pytest.raises(RuntimeError, match=f"pinned memory exhausted: {1 << 60} bytes"):
        synchronizer.reserve_pinned(1 << 60, "cpu")
    synchronizer.reserve_pinned(1 << 20, "cpu")  # and a size that exists is still returned
    assert synchronizer.pinned_usage()["reserved"] >= 1 << 20


def test_marks_of_no_tensor():
    for mark in (cpu_offload.mark_not_offload, cpu_offload.mark_activation_offload, cpu_offload.start_offload):
        for bad in (5, "x", [torch.ones(3)]):
            with refused(TypeError, mark.__name__, "argument 1", type(bad).__name__, "one by one"):
                mark(None, bad)
    with refused(TypeError, "start_offload", "'offload_base_tensor'", "3"):
        cpu_offload.start_offload(torch.ones(3), offload_base_tensor=3)


def test_a_tensor_of_another_layer(device):
    mine, other = OffloadableLayerState(), OffloadableLayerState()
    t = randn(100, device=device)
    saved = other.push_tensor(t)
    for state in ("not_offloaded", "offload_started", "offload_finished", "reload_started"):
        assert other.state == state
        with refused(RuntimeError, "pop_tensor", "pushed on another layer"):
            mine.pop_tensor(saved)
        steps = (other.start_offload, other.release_activation_forward_gpu_memory, other.start_reload, lambda: None)
        steps[("not_offloaded", "offload_started", "offload_finished", "reload_started").index(state)]()
    assert_same_bits(other.pop_tensor(saved), t)
    for bad in (5, None, [t]):
        for pop in (mine.pop_tensor, DefaultOffloadSynchronizer(2, 1).pop_tensor):
            with refused(TypeError, "pop_tensor", "'saved'", type(bad).__name__):
                pop(bad)
    assert mine.pop_tensor(t) is t


def test_an_exception_between_the_context_and_its_end(device):
    """The layer was complete but sync_fn never ran: the next layer is the first one of a new step."""
    layers = [te.LayerNormMLP(16, 32, device=device) for _ in range(4)]
    x = randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 2, 4)
    begun = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: begun.append(int(context.offload_synchronizer.number)))

    def broken(at):
        y = x.clone().requires_grad_()
        for i, layer in enumerate(layers):
            with context:
                y = layer(y)
            if i == at:
                raise ArithmeticError("between")
            y = sync(y)

    for at in range(4):
        with contextlib.suppress(ArithmeticError):  # which, unlike pytest.raises, keeps no frame with its graph
            broken(at)
        begun.clear()
        results = step(layers, [x], context, sync)
        assert begun == [0, 1, 2, 3], at
        for i, (a, b) in enumerate(zip(results, expected, strict=True)):
            assert_same_bits(a, b, f"result {i}")
        del results
        context.offload_synchronizer.forget_step()
        assert context.offload_synchronizer.pinned_usage()["slots"] == 0
    assert not cpu_offload.is_cpu_offload_enabled()


class Model(torch.nn.Module):
    """The copied object holds its context, its sync function and its synchronizer, as models do."""

    def __init__(self, device):
        super().__init__()
        self.layers = torch.nn.ModuleList([te.LayerNormMLP(16, 32 + 16 * i, device=device) for i in range(3)])
        self.offload = te.get_cpu_offload_context(True, None, 3, manual_synchronization=True)

    def forward(self, x):
        context, sync, manual = self.offload
        x = forward(self.layers, x, context, sync)
        manual.start_offload_layer(0)
        manual.release_activation_forward_gpu_memory(0)
        return x


def test_a_copied_model_shares_its_context(device):
    """Copied before a step and after one, when it has engines, which cannot be copied."""
    model, x = Model(device), randn(8, 16, device=device)
    expected = step([model], [x])
    twin = copy.deepcopy(model)
    assert all(a is b for a, b in zip(twin.offload, model.offload, strict=True))
    for i, (a, b) in enumerate(zip(step([twin], [x]), expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")
    assert twin.offload[2].get_offloaded_total_size_mb() > 0


def test_more_layers_than_model_layers(device):
    """A model longer than model_layers: a step of offload ends after model_layers, and another one begins."""
    layers, x = [te.LayerNormMLP(16, 32, device=device) for _ in range(5)], randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    for i, (a, b) in enumerate(zip(step(layers, [x], context, sync), expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("how", ["never", "twice", "of integers"])
def test_a_sync_function_that_is_called_otherwise(how, device):
    """The bits are right under any schedule."""
    layers, x = [te.LayerNormMLP(16, 32, device=device) for _ in range(3)], randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, 2, 3)

    def otherwise(y):
        if how == "of integers":
            assert sync(torch.arange(3, device=device)).tolist() == [0, 1, 2]
        return sync(sync(y)) if how == "twice" else y

    for _ in range(2):
        for i, (a, b) in enumerate(zip(step(layers, [x], context, otherwise), expected, strict=True)):
            assert_same_bits(a, b, f"result {i}")
