# On a GPU the two copies are kept in order by the waits of the compute stream and on it: with a wait left out the bits
# are others. The six waits themselves are tested in tests/cpp/test_offload.cpp, by the trace. These tests leave
# waits out, by `left_out`.
import pytest
import torch

from transformer_engine.pytorch.cpu_offload import OffloadableLayerState
from transformer_engine.pytorch.cpu_offload.layer import Engines

from .cases import small  # noqa: F401

PRODUCED, RELOADED = 1, 16  # te_offload_wait
LONG = 100_000_000  # clock cycles: some 50 ms
ELEMENTS = 4 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("left_out", [0, PRODUCED])
def test_the_copy_out_waits_for_the_computation(left_out, small):  # noqa: F811
    state = OffloadableLayerState(engines=Engines(left_out=left_out))
    t = torch.zeros(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    t.fill_(3)
    saved = state.push_tensor(t)
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    assert torch.equal(state.pop_tensor(saved), t) == (left_out == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("left_out", [0, RELOADED])
def test_what_is_computed_waits_for_the_copy_back(left_out, small):  # noqa: F811
    engines = Engines(left_out=left_out)
    state = OffloadableLayerState(engines=engines)
    t = torch.full((ELEMENTS,), 3.0, device="cuda")
    saved = state.push_tensor(t)
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    ((_, engine),) = engines
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(engine.streams()[1])):
        torch.cuda._sleep(LONG)
    state.start_reload()
    seen = state.pop_tensor(saved) + 0
    assert torch.equal(seen, t) == (left_out == 0)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_copies_run_beside_the_computation(small):  # noqa: F811
    """They run on separate streams: the compute stream ends first, and neither waits for the other."""
    engines = Engines()
    state = OffloadableLayerState(engines=engines)
    t = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")  # 5 ms of the link
    saved = state.push_tensor(t)
    state.mark_ready([t])
    warm = OffloadableLayerState(engines=engines)  # allocates the pinned memory
    kept = warm.push_tensor(t)
    warm.start_offload()
    warm.release_activation_forward_gpu_memory()
    del kept
    torch.cuda.synchronize()
    ((_, engine),) = engines
    d2h = torch.cuda.ExternalStream(engine.streams()[0])
    copied, computed = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LONG)
    state.start_offload()
    copied.record(d2h)
    computed.record()
    torch.cuda.synchronize()
    assert copied.elapsed_time(computed) > 0  # the mark was set before the sleep
    state.pop_tensor(saved)
