# Other promises of the API that clients rely on: attributes of a context and a synchronizer that show where a step is,
# the order of arguments, the older module path.
import warnings

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload, cpu_offload_v1
from transformer_engine.pytorch.cpu_offload import context as offload_context

from .cases import forward, small, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")

N, K = 4, 2


def stack(device):
    return [te.LayerNormMLP(16, 32, device=device) for _ in range(N)]


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def test_where_a_step_is(device):
    """By number in the forward and in the backward; the layers are those of the newest step."""
    layers, seen = stack(device), []
    context, sync = te.get_cpu_offload_context(True, K, N)
    synchronizer = context.offload_synchronizer

    def look(*_):
        assert set(synchronizer.layer_states) == set(range(N))
        states = [synchronizer.layer_states[i].state for i in range(N)]
        seen.append((synchronizer.num_of_fwds, synchronizer.current_layer_id, states.count("offload_finished")))

    class Watched(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            look()
            x = self.inner(x)
            x.register_hook(look)
            return x * 1.0

    look()
    step([Watched(layer) for layer in layers], [randn(8, 16, device=device)], context, sync)
    before, run = seen[0], seen[1:]
    assert before == (None, None, 0)
    assert run[:N] == [(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 2)]
    assert [entry[:2] for entry in run[N:]] == [(3, 3), (3, 2), (3, 1), (3, 0)]
    synchronizer.forget_step()
    assert synchronizer.num_of_fwds is None and synchronizer.current_layer_id is None


def test_layer_states_are_those_of_the_newest_step(device):
    layers, x = stack(device), randn(8, 16, device=device, requires_grad=True)
    context, sync, manual = te.get_cpu_offload_context(True, None, N, manual_synchronization=True)
    first = forward(layers, x, context, sync)
    manual.start_offload_layer(1)
    older = manual.layer_states
    second = forward(layers[:2], x, context, sync)
    manual.start_offload_layer(0)
    assert [manual.layer_states[i].state for i in range(N)] == ["offload_started"] + 3 * ["not_offloaded"]
    assert [older[i].state for i in range(N)] == ["not_offloaded", "offload_started"] + 2 * ["not_offloaded"]
    assert manual.layer_states[0].get_offloaded_total_size_mb() == manual.get_offloaded_total_size_mb() > 0
    (first.sum() + second.sum()).backward()


def test_inside_of_a_context(device):
    layers, x = stack(device), randn(8, 16, device=device)
    context, sync = te.get_cpu_offload_context(True, K, N)
    other, _ = te.get_cpu_offload_context(True, K, N)
    with torch.no_grad(), context, other:
        assert context.inside_context and other.inside_context
    assert context.inside_context is False
    with context:
        assert not other.inside_context
        assert context.inside_context is True
        with torch.no_grad(), context:
            pass
        assert context.inside_context is True
        y = layers[0](x)
    assert context.inside_context is False
    sync(y)
    with pytest.raises(ArithmeticError), context:
        raise ArithmeticError
    assert context.inside_context is False
    idle, _ = te.get_cpu_offload_context(False)
    with idle:
        assert idle.inside_context is False  # nothing is offloaded there


@pytest.mark.parametrize("enabled", [True, False])
def test_a_decorator(enabled, device):
    layers, x = stack(device), randn(8, 16, device=device)
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(enabled, K, N)

    @context
    def run(layer, x, *, noted=None):
        """A layer."""
        assert context.inside_context == cpu_offload.is_cpu_offload_enabled() == enabled
        return layer(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = sync(run(layer, x, noted=1))
            return x

    for _ in range(2):
        same(step([Model()], [x]), expected)
    assert (context.offload_synchronizer.get_offloaded_total_size_mb() > 0) == enabled
    assert run.__name__ == "run" and run.__doc__ == "A layer."
    assert context.inside_context is False


def test_weights_are_not_offloaded(device):
    """The argument raises a warning that they stay, and has no other effect."""
    layers, x = stack(device), randn(8, 16, device=device)
    expected = step(layers, [x])
    with pytest.warns(UserWarning, match="'offload_weights' is True, which has no effect") as caught:
        context, sync = te.get_cpu_offload_context(True, K, N, True, True)
    assert len(caught) == 1 and caught[0].filename == __file__
    same(step(layers, [x], context, sync), expected)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
    for manual in (False, True):
        options = {"offload_activations": False, "manual_synchronization": manual}
        with pytest.warns(UserWarning, match="'offload_weights' is True"):
            context, sync, *rest = te.get_cpu_offload_context(True, K, N, offload_weights=True, **options)
        assert not context.enabled and rest == [None] * manual
        same(step(layers, [x], context, sync), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.get_cpu_offload_context(False, K, N, True, True)


def test_arguments_by_their_places(device):
    """num_layers[, num_offloaded_layers], retain_pinned_cpu_buffers, offload_stream."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    for synchronizer in (
        cpu_offload.DefaultOffloadSynchronizer(N, K, True, stream),
        cpu_offload.ManualOffloadSynchronizer(N, True, stream),
        te.get_cpu_offload_context(True, K, N, True, False, False, False, True, stream)[0].offload_synchronizer,
        te.get_cpu_offload_context(True, K, N, True, False, False, True, True, stream)[2],
    ):
        assert synchronizer.num_layers == N and synchronizer.retain is True
        layer = synchronizer.layer_states[0]
        layer.push_tensor(randn(100, device=device))
        layer.start_offload()
        if device == "cuda":
            assert synchronizer.copy_streams(torch.device("cuda"))[0].cuda_stream == stream.cuda_stream


def test_the_older_module_has_every_name():
    names = {name for name in vars(cpu_offload) if not name.startswith("_")}
    names -= {"arguments", "context", "layer", "leaving", "marks", "schedule", "steps"}
    assert {"get_cpu_offload_context", "mark_not_offload", "OffloadableLayerState"} < names
    for name in names:
        assert getattr(cpu_offload_v1, name) is getattr(cpu_offload, name)


def test_there_is_one_path(monkeypatch, device):
    """The variable that selects the other implementation raises one warning; marks still hold."""
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    offload_context._warn_v1_path.cache_clear()
    with pytest.warns(UserWarning, match=r"NVTE_CPU_OFFLOAD_V1=1 .* only one.*mark_not_offload\(\)") as caught:
        made = [cpu_offload_v1.get_cpu_offload_context(True, K, N) for _ in range(3)]
    assert len(caught) == 1 and caught[0].filename == __file__
    layers, x = stack(device), randn(8, 16, device=device)
    expected = step(layers, [x])
    same(step(layers, [x], *made[0]), expected)
    left = made[0][0].offload_synchronizer.get_offloaded_total_size_mb()
    x = randn(8, 16, device=device, requires_grad=True)
    cpu_offload_v1.mark_not_offload(x)
    forward(layers, x, *made[1]).sum().backward()
    assert left - made[1][0].offload_synchronizer.get_offloaded_total_size_mb() == x.nbytes / 2**20
    for value in ("0", "2", ""):
        monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", value)
        offload_context._warn_v1_path.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            te.get_cpu_offload_context(True, K, N)
    with refused(ValueError, "offload_activations"):
        te.get_cpu_offload_context(True, K, N, offload_activations=False)
