# Peak memory under the default schedule equals its definition, to the byte where the layers are of known size: layers
# on the device, a layer's own work, and gradients between layers.
import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import layer as offload_layer

from .cases import forward, peak_bytes, small  # noqa: F401

MIB = 1 << 20
UNEVEN = (3, 2, 5, 2, 4, 6)


class _Keeps(torch.autograd.Function):
    """The identity on a small tensor, which saves `sizes` bytes for its backward."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.save_for_backward(*(x.new_empty(size // 4).fill_(3) for size in sizes))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        assert all(kept[0] == 3 and kept[-1] == 3 for kept in ctx.saved_tensors)
        return gradient * 1, None


def on_device(n, k, layer, backward):
    """The layers on the device while `layer` runs, or its backward."""
    if backward:
        return [i for i in range(layer + 1) if i >= k or layer <= n - 1 - k + i]
    return [i for i in range(layer + 1) if i >= k or layer < n - k + i]


def most_kept(sizes, k):
    n = len(sizes)
    return max(sum(sizes[i] for i in on_device(n, k, j, way)) for j in range(n) for way in (False, True))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("sizes", [(4,) * 6, UNEVEN, (9, 2)], ids=str)
def test_layers_of_known_size(sizes, pieces, device):
    n = len(sizes)
    for k in range(n):
        context, sync = te.get_cpu_offload_context(True, k, n)
        layers = [lambda x, size=size: _Keeps.apply(x, [size * MIB] * pieces) for size in sizes]
        x = torch.zeros(64, device=device, requires_grad=True)

        def run(layers=layers, x=x, context=context, sync=sync):
            forward(layers, x, context, sync).sum().backward()

        run()  # one-time allocations are made
        wanted = most_kept([pieces * size * MIB for size in sizes], k)
        assert 0 <= peak_bytes(run, device) - wanted < 64 * 1024, (k, sizes)  # no layer is that small


def test_small_pieces_travel_packed(device):
    """Tensors under 2 MiB: they exist twice during the offload and the reload, and no longer."""
    n, k, piece = 4, 2, MIB
    context, sync = te.get_cpu_offload_context(True, k, n)
    layers = [lambda x: _Keeps.apply(x, [piece] * 4)] * n
    x = torch.zeros(64, device=device, requires_grad=True)

    def run():
        forward(layers, x, context, sync).sum().backward()

    run()
    # Both are complete before layer 2 begins, which requires that layer 0 was released.
    assert 0 <= peak_bytes(run, device) - 2 * 2 * 4 * piece < 64 * 1024


def test_what_came_back_packed_is_there_once(device):
    state = offload_layer.OffloadableLayerState()
    saved = [state.push_tensor(torch.ones(MIB // 4, device=device)) for _ in range(4)]
    state.start_offload()
    state.release_activation_forward_gpu_memory()

    def run():
        state.start_reload()
        assert torch.equal(state.pop_tensor(saved[0]), torch.ones(MIB // 4, device=device))
        torch.empty(4 * MIB, dtype=torch.uint8, device=device)

    assert 0 <= peak_bytes(run, device) - 8 * MIB < 64 * 1024


def transformer(device):
    return te.TransformerLayer(512, 2048, 4, attention_dropout=0.0, device=device)


def gated(device):
    return te.LayerNormMLP(512, 1024, activation="swiglu", device=device)


@pytest.mark.parametrize("make", [transformer, gated], ids=lambda make: make.__name__)
def test_real_layers(make, device, monkeypatch):
    """Within 2 % of the sum of its terms: saved tensors of a layer, work of its backward, the result, two gradients."""
    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 128 * 1024)
    n, x = 4, randn(1024, 1, 512, device=device, requires_grad=True)
    layers = [make(device) for _ in range(n)]

    def step(layers, *offload):
        y = forward(layers, x, *offload)
        y.backward(torch.ones_like(y))

    for _ in range(2):
        step(layers)  # gradients exist and are added to
    own = te.memory_plan(layers[0], x).kept_bytes
    work = peak_bytes(lambda: step(layers[:1]), device) - own - 2 * x.nbytes  # beside the result and its gradient
    kept = own + x.nbytes  # the input of a layer is the result of the previous one
    figures = []
    for k in (0, 1, 2, 3):
        context, sync = te.get_cpu_offload_context(True, k, n)
        step(layers, context, sync)
        predicted = (n - k) * kept + work + (3 if k else 1) * x.nbytes  # the caller holds the first input
        measured = peak_bytes(lambda: step(layers, context, sync), device)  # noqa: B023
        figures.append((k, measured, predicted))
    assert all(abs(measured - predicted) <= 0.02 * predicted for _, measured, predicted in figures), figures


def split(device):
    return te.Linear(64, 96, parameters_split=("a", "b", "c"), device=device)


def split_behind_norm(device):
    return te.LayerNormLinear(64, 96, parameters_split=("a", "b", "c"), device=device)


def attention(device):
    return te.MultiheadAttention(64, 4, input_layernorm=True, attention_dropout=0.0, device=device)


@pytest.mark.parametrize("make", [split, split_behind_norm, attention], ids=lambda make: make.__name__)
def test_weights_that_are_joined_stay(make, small, device):  # noqa: F811
    """The offload of a parameter would free nothing, and its reload would allocate a second copy."""
    layer, x = make(device), randn(8, 2, 64, device=device, requires_grad=True)
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    with context:
        y = layer(x)
    memory = context.offload_synchronizer.current_layer().taken
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    leaving = [m for m in memory if m.large_enough and not m.stays]
    assert leaving
    assert not own & {m.tensor.untyped_storage().data_ptr() for m in leaving}
    sync(y).sum().backward()
    plan = te.memory_plan(layer, x)
    assert all(row.status != "offloaded" for row in plan.rows if row.status == "parameter")
