# The saved tensors of one layer: packed and unpacked, away and back as the views they were, moved once, and refused in
# the wrong state.
import pytest
import torch
from support import assert_same_bits, randn, refused
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.cpu_offload import (
    OffloadableLayerState,
    PinnedMemoryError,
    mark_activation_offload,
    mark_not_offload,
)
from transformer_engine.pytorch.cpu_offload.layer import Engines

from .cases import small  # noqa: F401


def away_and_back(state, tensors):
    """The results of pop_tensor after offload and reload; the original memory is overwritten meanwhile."""
    values = [t.detach().clone() for t in tensors]
    saved = [state.push_tensor(t) for t in tensors]
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    for t in tensors:
        t.detach().zero_()
    state.start_reload()
    return [state.pop_tensor(s) for s in saved], values


@pytest.mark.parametrize("sizes", [[1], [5, 0, 300], [16384, 3, 70000], [7] * 200], ids=lambda sizes: str(sizes)[:20])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_packed_tensors_come_back(sizes, dtype, device):
    tensors = [(torch.randn(n) * 50).to(dtype).to(device) for n in sizes]
    packed = functional.offload_pack(tensors)
    assert packed.numel() == functional.offload_packed_bytes(tensors)
    offset = 0
    for t in tensors:
        assert_same_bits(packed[offset : offset + t.nbytes], t.view(torch.uint8))
        offset += (t.nbytes + 255) // 256 * 256
    back = [torch.empty_like(t) for t in tensors]
    functional.offload_unpack(packed, back)
    for t, b in zip(tensors, back, strict=True):
        assert_same_bits(b, t)


def test_packing_names_what_is_wrong(device):
    t = torch.ones(8, 8, device=device)
    with refused(ValueError, "offload_pack", "contiguous"):
        functional.offload_pack([t.T])
    with refused(ValueError, "offload_pack", "packed", 256):
        functional.offload_pack([t], torch.empty(255, dtype=torch.uint8, device=device))
    with refused(ValueError, "offload_unpack", "packed"):
        functional.offload_unpack(torch.empty(256, device=device), [t])


def test_views_come_back_as_they_were(small, device):  # noqa: F811
    buffer = torch.arange(4096, dtype=torch.uint8, device=device)
    base = randn(8, 6, 10, device=device)
    tensors = [
        base,
        base.transpose(0, 2),
        base[2:5, 1:, ::3],
        base.as_strided((4, 3), (0, 7), 11),
        buffer[:1024],
        buffer[1024:1280].view(torch.float32),
        buffer[1280:1284].view(torch.float32)[0],
        buffer[2048:].view(torch.int64).view(16, 16).T,
    ]
    state = OffloadableLayerState()
    back, values = away_and_back(state, tensors)
    for t, b, value in zip(tensors, back, values, strict=True):
        assert_same_bits(b.reshape(-1), value.reshape(-1))
        assert (b.shape, b.stride(), b.dtype, b.storage_offset()) == (t.shape, t.stride(), t.dtype, t.storage_offset())
        assert b.device == t.device
    # One storage stays one storage, and is copied once.
    assert len({b.untyped_storage().data_ptr() for b in back[:4]}) == 1
    assert len({b.untyped_storage().data_ptr() for b in back[4:]}) == 1
    assert state.bytes == base.nbytes + buffer.nbytes
    assert state.get_offloaded_total_size_mb() == state.bytes / 2**20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool, torch.complex64], ids=str)
def test_any_dtype_leaves(dtype, small, device):  # noqa: F811
    t = (torch.randn(100) * 3).to(dtype).to(device)
    (back,), (value,) = away_and_back(OffloadableLayerState(), [t])
    assert torch.equal(back, value) and back.dtype == dtype


def test_tensors_that_stay(small, device):  # noqa: F811
    weight = torch.nn.Parameter(torch.ones(16, 16, device=device))
    marked, tiny = torch.ones(32, 32, device=device), torch.ones(63, device=device)
    mark_not_offload(marked.view(-1)[5:], None)
    mark_activation_offload(tiny)
    state = OffloadableLayerState()
    saved = [state.push_tensor(t) for t in (weight, weight.T, marked, marked.T, tiny)]
    state.start_offload()
    assert state.bytes == 0
    state.release_activation_forward_gpu_memory()
    for t, s in zip((weight, weight.T, marked, marked.T, tiny), saved, strict=True):
        assert state.pop_tensor(s).data_ptr() == t.data_ptr()
    assert vars(marked) == {} and vars(tiny) == {}  # the mark is on the view that was passed
    with refused(TypeError, "mark_not_offload", "list", "one by one"):
        mark_not_offload([marked])


def test_a_large_piece_takes_the_small_ones_of_its_memory_along(small, device):  # noqa: F811
    buffer = torch.zeros(1024, dtype=torch.uint8, device=device)
    scale = buffer[512:516].view(torch.float32)
    scale.fill_(0.37)
    alive = StorageWeakRef(buffer.untyped_storage())
    state = OffloadableLayerState()
    saved = state.push_tensor(buffer[:512]), state.push_tensor(scale)
    state.start_offload()
    del buffer, scale
    state.release_activation_forward_gpu_memory()
    assert alive.expired()  # nothing kept the buffer alive
    state.start_reload()
    assert state.pop_tensor(saved[1]).item() == torch.tensor(0.37).item()


def test_the_same_tensor_twice_moves_once(small, device):  # noqa: F811
    t = randn(100, device=device)
    state = OffloadableLayerState()
    first, second = away_and_back(state, [t, t])[0]
    assert state.bytes == t.nbytes and first.data_ptr() == second.data_ptr()


def test_states_and_refusals(small, device):  # noqa: F811
    state = OffloadableLayerState()
    saved = state.push_tensor(randn(100, device=device))
    order = ["not_offloaded", "offload_started", "offload_finished", "reload_started"]
    calls = ["start_offload", "release_activation_forward_gpu_memory", "start_reload"]
    for at, name in enumerate(order):
        assert state.state == name
        for fails_at, call in enumerate(calls):
            if fails_at != at:
                with refused(RuntimeError, call, name, order[fails_at]):
                    getattr(state, call)()
        if name == "offload_finished":
            with refused(RuntimeError, "pop_tensor", name, "reload_started"):
                state.pop_tensor(saved)
        else:
            state.pop_tensor(saved)
        if at < len(calls):
            getattr(state, calls[at])()
    state.release_all_memory()
    assert state.state == "not_offloaded"
    with refused(RuntimeError, "pop_tensor", "release_all_memory"):
        state.pop_tensor(saved)
    with refused(TypeError, "push_tensor", "list"):
        state.push_tensor([])


def test_the_last_wanted_tensor_frees_the_host_memory(small, device):  # noqa: F811
    engines = Engines()
    state = OffloadableLayerState(engines=engines)
    saved = [state.push_tensor(randn(100, device=device)) for _ in range(2)]
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    ((_, engine),) = engines
    assert engine.usage()["slots"] == 1
    saved.pop()
    assert engine.usage()["slots"] == 1
    saved.pop()
    assert engine.usage()["slots"] == 0 and state.state == "not_offloaded"
    engine.trim()
    assert engine.usage()["reserved"] == 0


@pytest.mark.parametrize("when", ["before it leaves", "while it leaves"])
def test_a_tensor_written_to_is_named(when, small, device):  # noqa: F811
    t = randn(100, device=device)
    state = OffloadableLayerState()
    saved = state.push_tensor(t)
    if when == "before it leaves":
        t.add_(1)
    state.start_offload()
    if when == "while it leaves":
        t.add_(1)
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    with refused(RuntimeError, "float32", "[100]", "version 0", "in-place"):
        state.pop_tensor(saved)


def test_a_tensor_written_to_when_it_has_left_is_right(small, device):  # noqa: F811
    t = randn(100, device=device)
    (back,), (value,) = away_and_back(OffloadableLayerState(), [t])
    assert t.abs().sum() == 0
    assert_same_bits(back, value)


def test_a_resized_storage_is_named(small, device):  # noqa: F811
    t = randn(100, device=device)
    state = OffloadableLayerState()
    saved = state.push_tensor(t)
    t.untyped_storage().resize_(0)
    state.start_offload()
    with refused(RuntimeError, "resized"):
        state.pop_tensor(saved)


def test_exhausted_memory_changes_nothing(small, device):  # noqa: F811
    state = OffloadableLayerState(engines=Engines(pinned_limit=2 << 20))
    t = randn(1 << 20, device=device)
    saved = state.push_tensor(t)
    with refused(PinnedMemoryError, "pinned memory exhausted", 4 << 20, 2 << 20):
        state.start_offload()
    assert state.state == "not_offloaded"
    assert state.pop_tensor(saved).data_ptr() == t.data_ptr()


def test_host_tensors_stay_where_device_tensors_leave(small, device):  # noqa: F811
    state = OffloadableLayerState()
    tensors = [randn(100), randn(100, device=device)]
    saved = [state.push_tensor(t) for t in tensors]
    state.start_offload()
    assert state.bytes == 400 * (1 if device == "cuda" else 2)
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    for t, s in zip(tensors, saved, strict=True):
        assert_same_bits(state.pop_tensor(s), t)


@pytest.mark.parametrize("leaves", [True, False])
def test_conjugate_and_negative_views(leaves, small, device):  # noqa: F811
    z = torch.complex(randn(100, device=device), randn(100, device=device))
    tensors = [z.conj(), z.conj().imag, torch._neg_view(z), torch._neg_view(z.conj()), z]
    assert tensors[0].is_conj() and tensors[1].is_neg()
    state = OffloadableLayerState()
    if leaves:
        back, values = away_and_back(state, tensors)
    else:
        back, values = [state.pop_tensor(state.push_tensor(t)) for t in tensors], tensors
    for t, b, value in zip(tensors, back, values, strict=True):
        assert torch.equal(b, value) and (b.is_conj(), b.is_neg()) == (t.is_conj(), t.is_neg())


def test_nested_and_quantized_tensors_stay(small, device):  # noqa: F811
    nested = torch.nested.nested_tensor([randn(8, 16, device=device), randn(4, 16, device=device)])
    integers = torch.quantize_per_tensor(randn(100, device=device), 0.1, 3, torch.qint8)
    state = OffloadableLayerState()
    saved = [state.push_tensor(t) for t in (nested, integers)]
    state.start_offload()
    assert state.bytes == 0
    back = [state.pop_tensor(s) for s in saved]
    assert back[0].is_nested and all(torch.equal(a, b) for a, b in zip(back[0].unbind(), nested.unbind(), strict=True))
    assert back[1].is_quantized and torch.equal(back[1].dequantize(), integers.dequantize())


@pytest.mark.parametrize("case", ["whole", "base", "part", "written", "gone"])
def test_a_mark_covers_complete_memory(case, small, device):  # noqa: F811
    t = randn(100, device=device)
    state = OffloadableLayerState()
    state.mark_ready([t[:50] if case in ("part", "base") else t], whole_storage=case == "base")
    if case == "written":
        t.add_(1)
    if case == "gone":
        del t
        t = randn(100, device=device)
    saved = state.push_tensor(t)
    assert (state._ready_mark_of(saved.memory) >= 0) == (case in ("whole", "base"))


@pytest.mark.parametrize("end", ["read", "given up"])
def test_a_mark_ends_with_the_use_of_its_layer(end, small, device):  # noqa: F811
    """Its memory lives on, and its next copy waits for all work until then."""
    t, state = randn(100, device=device), OffloadableLayerState()
    state.mark_ready([t])
    saved = state.push_tensor(t)
    if end == "read":
        state.start_offload()
    else:
        state.release_all_memory()
    del saved
    assert state.state == "not_offloaded"
    again = state.push_tensor(t)
    assert state._ready_mark_of(again.memory) == -1


def test_what_was_given_up_is_counted_no_more(small, device):  # noqa: F811
    state, t = OffloadableLayerState(), randn(100, device=device)
    old = state.push_tensor(t)
    state.start_offload()
    state.release_all_memory()
    saved = state.push_tensor(t)
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    del old
    assert state.state == "offload_finished" and not state.empty
    state.start_reload()
    assert_same_bits(state.pop_tensor(saved), t)


@pytest.mark.parametrize("how", ["read", "dropped"])
def test_memory_that_comes_back_is_used_after_its_copy(how, small, device):  # noqa: F811
    """By a reader, or by whatever gets the memory of a tensor that is not wanted any more."""
    wait, reloaded = 1, 16
    engines = Engines(trace=True)
    state = OffloadableLayerState(engines=engines)
    saved = [state.push_tensor(randn(100, device=device)) for _ in range(2)]
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    ((_, engine),) = engines
    before = len(engine.trace())
    if how == "read":
        state.pop_tensor(saved[0])
    else:
        saved.pop()
    assert [row[:2] for row in engine.trace()[before:]] == [(wait, reloaded)]


def test_the_end_of_a_backward_frees_what_came_back(small, device):  # noqa: F811
    """Also where its tensors are wanted by a later backward."""
    state, t = OffloadableLayerState(), randn(100, device=device)
    saved = state.push_tensor(t)
    for _ in range(2):
        if state.state == "not_offloaded":
            state.start_offload()
            state.release_activation_forward_gpu_memory()
        state.start_reload()
        back = state.pop_tensor(saved)
        assert_same_bits(back, t)
        memory = StorageWeakRef(back.untyped_storage())
        del back
        assert not memory.expired()
        state.finish_backward()
        assert memory.expired() and state.state == "offload_finished"
