# Quantized tensors under offload: class, dtype, shape, strides, scales, usages, shared memory and bits come back; one
# buffer of many tensors leaves as one. Mutants: bringing a layer back for the first part of a tensor alone
# (pop_saved in csrc/saved_hooks/saved_python.cpp) turns these red; keeping a tensor below the threshold, together
# with the buffer that contains it, or leaving a bulk tensor's amax on its new memory, turns those of one buffer red.
import gc

import pytest
import torch
from support import assert_same_bits, randn, refused
from torch.multiprocessing.reductions import StorageWeakRef

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import OffloadableLayerState, mark_not_offload
from transformer_engine.pytorch.cpu_offload import layer as offload_layer
from transformer_engine.pytorch.cpu_offload.layer import Engines
from transformer_engine.pytorch.tensor.subviews import buffer_of, restore_subview

from .cases import small  # noqa: F401
from .quantized_cases import E4M3, FORMATS, parts, quantizers

pytestmark = pytest.mark.usefixtures("small")


def through(state, saved):
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    state.start_reload()
    return [state.pop_tensor(s) for s in saved]


@pytest.mark.parametrize("shape", [(64, 48), (3, 21, 40)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_tensor_comes_back(name, shape, device):
    tensor = quantizers(device)[name](randn(*shape, device=device))
    expected = [t.clone() for t in parts(tensor)]
    state = OffloadableLayerState()
    saved = state.push_tensor(tensor)
    (back,) = through(state, [saved])
    assert type(back) is type(tensor) and back.shape == tensor.shape and back.dtype == tensor.dtype
    assert back.get_usages() == tensor.get_usages()
    for t, b, value in zip(parts(tensor), parts(back), expected, strict=True):
        assert_same_bits(b, value)
        assert (b.dtype, b.stride()) == (t.dtype, t.stride())
    assert_same_bits(back.dequantize(), tensor.dequantize())
    (again,) = (state.pop_tensor(saved),)
    assert again is not back and [t.data_ptr() for t in parts(again)] == [t.data_ptr() for t in parts(back)]
    assert len(parts(tensor)) == len(expected)  # the argument is unchanged


@pytest.mark.parametrize("name", ["delayed", "current", "block", "block1d"])
def test_one_buffer_of_many_leaves_as_one(name, device):
    sources = [randn(32, 48, device=device), randn(16, 80, device=device), randn(1, 16, device=device)]
    quantizer = quantizers(device)[name]
    made = bulk(quantizer, sources)
    wanted = [[t.clone() for t in parts(m)] for m in made]
    storages = {t.untyped_storage()._cdata for m in made for t in parts(m)}
    assert len(storages) == 1
    buffer = parts(made[0])[0].untyped_storage()
    alive, size = StorageWeakRef(buffer), buffer.nbytes()
    state = OffloadableLayerState()
    saved = [state.push_tensor(t) for m in made for t in parts(m)]
    state.start_offload()
    del buffer, made
    quantizer = None
    state.release_activation_forward_gpu_memory()
    assert state.bytes == size and alive.expired()
    state.start_reload()
    back = [state.pop_tensor(s) for s in saved]
    for b, value in zip(back, (t for own in wanted for t in own), strict=True):
        assert_same_bits(b, value)
    assert len({b.untyped_storage().data_ptr() for b in back}) == 1


COPY = 2  # te_offload_step.kind


@pytest.mark.parametrize("fields", [None, "small first"])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "block1d"])
def test_one_buffer_is_one_transfer(name, fields, device):
    """One copy in each direction, for any number of tensors in it, whichever of them is saved first."""
    engines = Engines(trace=True)
    made = bulk(quantizers(device)[name], [randn(32, 48, device=device) for _ in range(5)])
    buffer = parts(made[0])[0].untyped_storage()
    alive, size = StorageWeakRef(buffer), buffer.nbytes()
    plain = sorted((t for m in made for t in parts(m)), key=lambda t: t.numel() if fields else 0)
    expected = [t.clone() for t in plain]
    assert any(t.numel() < offload_layer.MIN_ELEMENTS for t in plain)
    state = OffloadableLayerState(engines=engines)
    saved = [state.push_tensor(t) for t in plain]
    state.start_offload()
    del buffer, made, plain
    state.release_activation_forward_gpu_memory()
    assert alive.expired()
    state.start_reload()
    for s, value in zip(saved, expected, strict=True):
        assert_same_bits(state.pop_tensor(s), value)
    ((_, engine),) = engines
    out, back = [row for row in engine.trace() if row[0] == COPY]
    assert size <= out[-1] == back[-1] < size + 256  # packed: rounded up to 256 bytes


@pytest.mark.parametrize("name", ["delayed", "current", "block", "block1d"])
def test_what_is_left_of_a_saved_storage_holds_no_buffer(name, device):
    """As modules save it: the storage of its restored parts lives in the graph."""
    quantizer = quantizers(device)[name]
    quantizer.internal = True
    made = bulk(quantizer, [randn(32, 48, device=device), randn(16, 16, device=device)])
    alive = StorageWeakRef(made[0].get_data_tensors()[0].untyped_storage())
    wanted = [m.dequantize() for m in made]
    plain, shells = te.prepare_for_saving(*made)
    state = OffloadableLayerState()
    saved = [None if t is None else state.push_tensor(t) for t in plain]
    del made, plain
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert alive.expired()
    state.start_reload()
    back = te.restore_from_saved(shells, [None if s is None else state.pop_tensor(s) for s in saved])
    for b, value in zip(back, wanted, strict=True):
        assert_same_bits(b.dequantize(), value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "block", "block1d"])
def test_device_memory_falls_by_the_whole_buffer(name, monkeypatch):
    """With the default threshold: the scales and amaxes are far below it."""
    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 256 * 1024)
    quantizer, sources = quantizers("cuda")[name], [randn(1024, 1024, device="cuda") for _ in range(4)]
    del bulk(quantizer, sources)[:]
    state = OffloadableLayerState()
    gc.collect()  # no garbage of other tests is freed in between
    before = torch.cuda.memory_allocated()
    made = bulk(quantizer, sources)
    assert torch.cuda.memory_allocated() - before >= 8 << 20  # rows and columns of all of them
    saved = [state.push_tensor(m) for m in made]
    wanted = [m.dequantize().cpu() for m in made]
    del made
    state.start_offload()
    state.release_activation_forward_gpu_memory()
    assert torch.cuda.memory_allocated() == before
    state.start_reload()
    for s, value in zip(saved, wanted, strict=True):
        assert_same_bits(state.pop_tensor(s).dequantize().cpu(), value)


def bulk(quantizer, sources):
    from transformer_engine.pytorch.tensor.packing import quantize_into_one_buffer

    return quantize_into_one_buffer(sources, [quantizer] * len(sources))


@pytest.mark.parametrize("name", ["delayed", "current", "block", "block1d"])
def test_subview_records(name, device):
    (made,) = bulk(quantizers(device)[name], [randn(32, 48, device=device)])
    buffer = buffer_of(parts(made)[0]).clone()
    infos = {kind: getattr(made, f"get_{kind}_subview_info")() for kind in ("rowwise", "columnwise")}
    for kind, info in infos.items():
        before = {field: getattr(made, field).clone() for field in info}
        for field in before:
            setattr(made, field, None)
        getattr(made, f"restore_{kind}_subviews")(buffer, info)
        for field, value in before.items():
            assert_same_bits(getattr(made, field), value)
            assert getattr(made, field).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        scale = next(record for record in info.values() if record.dtype is torch.float32)
        for wrong, word in (
            (scale._replace(offset=scale.offset + 1), "aligned"),
            (scale._replace(offset=buffer.numel()), "bytes"),
            (scale._replace(offset=-4), "aligned"),
        ):
            with refused(ValueError, "restore_subview", word):
                restore_subview(buffer, wrong)
        # Read as bytes, the scale would be wrong without an error.
        as_bytes = restore_subview(buffer, scale._replace(dtype=torch.uint8))
        assert as_bytes.dtype is not restore_subview(buffer, scale).dtype


def test_a_marked_quantized_tensor_stays(device):
    tensor = quantizers(device)["current"](randn(64, 48, device=device))
    mark_not_offload(tensor)
    state = OffloadableLayerState()
    saved = state.push_tensor(tensor)
    state.start_offload()
    assert state.bytes == 0
    assert_same_bits(state.pop_tensor(saved).dequantize(), tensor.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_are_not_those_that_were_saved(name, device):
    """Swapped, or of another shape or dtype: an error names it, and nothing is restored."""
    tensor = quantizers(device)[name](randn(32, 48, device=device))
    expected = tensor.dequantize()
    plain, shells = te.prepare_for_saving(tensor)
    there = [i for i, t in enumerate(plain) if t is not None]
    others = [(there[0], plain[there[0]][:16]), (there[0], plain[there[0]].to(torch.float64)), (there[0], None)]
    if len(there) > 1:
        others.append((there[0], plain[there[-1]]))
    for at, other in others:
        with refused(ValueError, "restore_from_saved", "wanted", "[32, 48]"):
            te.restore_from_saved(shells, [other if i == at else t for i, t in enumerate(plain)])
    (back,) = te.restore_from_saved(shells, plain)
    assert_same_bits(back.dequantize(), expected)


def test_subviews_of_two_formats(device):
    """The directions of a hybrid tensor have different formats, and a buffer each: both are offloaded, reloaded and
    restored from their records."""
    both = {"rowwise": True, "columnwise": True}
    current = te.Float8CurrentScalingQuantizer(E4M3, device)
    made = te.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=te.Float8BlockQuantizer(E4M3, **both))(
        randn(32, 48, device=device)
    )
    (rows,), (columns,) = (bulk(part._quantizer, [made.dequantize()]) for part in halves(made))
    made.rowwise_storage, made.columnwise_storage = rows, columns
    wanted, values = [t.clone() for t in parts(made)], made.dequantize()
    infos = [made.get_rowwise_subview_info(), made.get_columnwise_subview_info()]
    assert all(infos) and infos[0].keys() != infos[1].keys()
    state = OffloadableLayerState()
    saved = [state.push_tensor(t) for t in (made, *(buffer_of(parts(half)[0]) for half in halves(made)))]
    back, *buffers = through(state, saved)
    for got, value in zip(parts(back), wanted, strict=True):
        assert_same_bits(got, value)
    _, (shell,) = te.prepare_for_saving(back)
    shell.restore_rowwise_subviews(buffers[0], infos[0])
    shell.restore_columnwise_subviews(buffers[1], infos[1])
    assert_same_bits(shell.dequantize(), values)
    for half, buffer in zip(halves(shell), buffers, strict=True):
        assert all(t.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for t in parts(half))


def halves(tensor):
    return tensor.rowwise_storage, tensor.columnwise_storage


class Scales(torch.autograd.Function):
    """x times the sum of a quantized tensor, which it saves whole."""

    @staticmethod
    def forward(ctx, x, tensor):
        ctx.save_for_backward(tensor)
        return x * tensor.dequantize().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].dequantize().sum(), None


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=["both", "rows", "columns"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_without_a_call_to_reload_it(name, usages, device):
    """The backward reloads the layer for any offloaded part of the tensor: the first part may be missing or small."""
    quantizer = quantizers(device)[name]
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    tensor, x = quantizer(randn(64, 48, device=device)), randn(3, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(Scales.apply(x, tensor).sum(), x)
    context, sync, manual = te.get_cpu_offload_context(True, None, 1, manual_synchronization=True)
    with context:
        y = Scales.apply(x, tensor)
    y = sync(y)
    manual.start_offload_layer(0)
    del tensor
    manual.release_activation_forward_gpu_memory(0)
    assert manual.get_offloaded_total_size_mb() > 0
    assert_same_bits(torch.autograd.grad(y.sum(), x)[0], expected)
