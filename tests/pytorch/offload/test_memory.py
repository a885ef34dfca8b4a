# Device memory under offload: it falls by the predicted bytes, stays so, and small pieces of a buffer keep no memory.
import gc

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import OffloadableLayerState

from .cases import forward, small  # noqa: F401

WIDTH, TOKENS, LAYERS = 1024, 8192, 6


def peak_of(layers, x, context=None, sync=None):
    """Peak bytes above those at the start. Gradients are allocated before, so that saved tensors determine the peak."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward(layers, x, context, sync).backward(torch.ones_like(x))
    return torch.cuda.max_memory_allocated() - start


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_peak_falls_by_the_layers_that_leave(k):
    layers = [
        te.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", params_dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    without = peak_of(layers, x)
    context, sync = te.get_cpu_offload_context(True, k, LAYERS)
    measured = peak_of(layers, x, context, sync)
    moved = context.offload_synchronizer.get_offloaded_total_size_mb() * 2**20
    per_layer = TOKENS * (WIDTH + WIDTH + 4 * WIDTH) * 2  # the input and output of its norm, gate and up
    assert moved >= k * per_layer
    predicted = without - k * per_layer
    # The caller holds the input of the first layer, so its offload frees nothing. Without offload the peak is at the
    # start of the backward; with it, it lasts until layers stop being reloaded, where the caller holds no gradient.
    predicted += 2 * TOKENS * WIDTH * 2
    assert abs(measured - predicted) <= 0.02 * predicted, (without, measured, predicted)


@pytest.mark.gpu
def test_nothing_grows_over_50_steps():
    layers = [te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(4096, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    context, sync = te.get_cpu_offload_context(True, 2, 4)
    figures = set()
    gc.collect()  # no garbage of other tests is freed in between
    for i in range(50):
        forward(layers, x, context, sync).sum().backward()
        if i >= 2:
            figures.add((torch.cuda.memory_allocated(), *context.offload_synchronizer.pinned_usage().values()))
    assert len(figures) == 1


@pytest.mark.gpu
def test_a_whole_buffer_is_given_back(small):  # noqa: F811
    """Data and scale of a bulk buffer: the freed memory is that of the whole buffer."""
    buffer = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    state = OffloadableLayerState()
    saved = [state.push_tensor(buffer[: 32 << 20]), state.push_tensor(buffer[-16:].view(torch.float32))]
    del buffer
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert before - torch.cuda.memory_allocated() == 64 << 20
    state.start_reload()
    assert [state.pop_tensor(s).numel() for s in saved] == [32 << 20, 4]
