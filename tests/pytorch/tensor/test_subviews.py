# Many tensors in one byte buffer, and the records by which their parts leave it and come back.
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import (
    FP8_FORMATS,
    assert_readable,
    assert_same_parts,
    assert_same_tensor,
    current,
    delayed,
    parts_of,
)
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import packing
from transformer_engine.pytorch.tensor.layout import data_bytes
from transformer_engine.pytorch.tensor.subviews import Subview, buffer_of, restore_subview, subview_of

every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)
SHAPES = [(16, 32), (5, 7), (5, 48), (0, 3), (3, 2, 40), (130, 300)]


def many(name, device, shapes=SHAPES, internal=False):
    quantizer = FP8_FORMATS[name](device=device)
    quantizer.internal = internal
    sources = [randn(*shape, device=device, scale=i + 1.0) for i, shape in enumerate(shapes)]
    return quantizer.multi_quantize(sources), sources


def extent(t):
    """The bytes [first, last) that t covers of its storage."""
    first = t.storage_offset() * t.element_size()
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    return first, first + span * t.element_size()


# ---- one buffer ----


@every_fp8
@pytest.mark.parametrize("internal", [False, True])
def test_each_tensor_is_as_if_alone(device, name, internal):
    made, sources = many(name, device, internal=internal)
    for t, x in zip(made, sources, strict=True):
        quantizer = FP8_FORMATS[name](device=device)
        quantizer.internal = internal
        alone = quantizer(x)
        assert type(t) is type(alone)
        assert_same_parts(t, alone)
        assert_same_bits(t.dequantize(), alone.dequantize())


@every_fp8
def test_one_allocation_holds_everything(device, name):
    made, _ = many(name, device)
    parts = [p for t in made for p in parts_of(t).values()]
    parts += [t._amax for t in made if hasattr(t, "_amax")]
    (buffer,) = {p.untyped_storage().data_ptr() for p in parts}
    assert len(parts) == len(SHAPES) * 4  # two directions; two scales, or one and an amax
    taken = sorted(extent(p) for p in parts if p.numel())
    for (_, end), (start, _) in itertools.pairwise(taken):
        assert end <= start
    for p in parts:
        assert (p.storage_offset() * p.element_size()) % 16 == 0
    data = sum(data_bytes(*t._native().rowwise.shape) + data_bytes(*t._native().columnwise.shape) for t in made)
    assert data <= parts[0].untyped_storage().nbytes() <= data + 256 * 4 * len(made) + 4 * 1400
    assert buffer == parts[0].untyped_storage().data_ptr()


@every_fp8
def test_products_can_read_it_where_it_lies(device, name):
    for t in many(name, device)[0]:
        assert_readable(t)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    name=st.sampled_from(list(FP8_FORMATS)),
)
def test_any_shapes_together(shapes, name):
    made, sources = many(name, "cpu", shapes)
    for t, x in zip(made, sources, strict=True):
        assert_same_tensor(t, FP8_FORMATS[name]()(x))


def test_amaxes_are_in_the_buffer_and_are_noted(device):
    for make in (delayed, current):
        quantizer = make(device=device, **({} if make is delayed else {"amax": torch.zeros(1, device=device)}))
        sources = [torch.full((2, 3), v, device=device) for v in (3.0, -7.0, 5.0)]
        made = quantizer.multi_quantize(sources)
        assert [t._amax.item() for t in made] == [3.0, 7.0, 5.0]
        assert quantizer.amax.item() == 7.0


def test_different_quantizers_share_a_buffer(device):
    quantizers = [make(device=device) for make in FP8_FORMATS.values()]
    x = randn(33, 48, device=device)
    made = packing.quantize_into_one_buffer([x] * 4, quantizers)
    assert len({p.untyped_storage().data_ptr() for t in made for p in parts_of(t).values()}) == 1
    for t, make in zip(made, FP8_FORMATS.values()):
        assert_same_tensor(t, make(device=device)(x))


def test_none_and_what_does_not_fit():
    assert current().multi_quantize([]) == []
    with refused(ValueError, "multi_quantize", "'tensor'", "int64"):
        current().multi_quantize([torch.ones(2), torch.arange(2)])
    with refused(ValueError, "multi_quantize", "meta"):
        current().multi_quantize([torch.ones(2), torch.ones(2, device="meta")])
    with refused(ValueError, "multi_quantize", "HybridQuantizer", "built-in"):
        te.HybridQuantizer(rowwise_quantizer=current(), columnwise_quantizer=current()).multi_quantize([torch.ones(2)])


# ---- records ----


@every_fp8
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_out_of_one_buffer_and_into_another(device, name, shape):
    """As offload does: the bytes move as one, the parts come back as views of the moved bytes: class, dtypes, shapes,
    strides, values, usages and aliasing are unchanged."""
    made, _ = many(name, device, [(3, 8), shape, (7, 7)], internal=True)
    storage = made[1]
    wanted, native = parts_of(storage), {n: p.clone() for n, p in parts_of(storage).items()}
    rowwise, columnwise = storage.get_rowwise_subview_info(), storage.get_columnwise_subview_info()
    assert set(rowwise) | set(columnwise) >= set(wanted)
    for info in (rowwise, columnwise):
        for field, record in info.items():
            part = getattr(storage, field)
            assert record.dtype is part.dtype and record.shape == tuple(part.shape)
            assert record.offset == part.storage_offset() * part.element_size()
    buffer = buffer_of(next(iter(wanted.values())))
    moved = torch.full_like(buffer, 255)
    moved.copy_(buffer)
    storage.prepare_for_saving()
    buffer.fill_(17)
    storage.restore_rowwise_subviews(moved, rowwise)
    storage.restore_columnwise_subviews(moved, columnwise)
    storage._written()
    assert storage.get_usages() == {"rowwise": True, "columnwise": True}
    for field, part in parts_of(storage).items():
        assert (part.dtype, part.stride()) == (wanted[field].dtype, wanted[field].stride())
        assert_same_bits(part, native[field], field)
        assert part.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
    if name in ("delayed", "current"):
        assert storage._scale_inv.dtype is torch.float32 and storage._amax.dtype is torch.float32


@every_fp8
def test_parts_with_memory_of_their_own_have_no_record(device, name):
    t = FP8_FORMATS[name](device=device)(randn(16, 32, device=device))
    assert t.get_rowwise_subview_info() is None and t.get_columnwise_subview_info() is None
    one = FP8_FORMATS[name](device=device, columnwise=False).multi_quantize([randn(16, 32, device=device)])[0]
    assert one.get_columnwise_subview_info() is None and one.get_rowwise_subview_info()


def test_records_that_do_not_fit_change_nothing():
    made, _ = many("block2d", "cpu", [(16, 32)], internal=True)
    storage, before = made[0], parts_of(made[0])
    info = storage.get_rowwise_subview_info()
    buffer = buffer_of(before["_rowwise_data"])
    scale = info["_rowwise_scale_inv"]
    for bad, words in (
        (scale._replace(offset=scale.offset + 2), ("aligned", "float32", scale.offset + 2)),
        (scale._replace(offset=buffer.numel()), ("bytes", buffer.numel())),
        (scale._replace(offset=-16), ("aligned",)),
        (scale._replace(stride=(1,)), ("shape", "stride")),
        (scale._replace(stride=(-4, 1)), ("shape", "stride")),
    ):
        with refused(ValueError, "restore_subview", *words):
            storage.restore_rowwise_subviews(buffer, {**info, "_rowwise_scale_inv": bad})
        assert all(getattr(storage, n) is p for n, p in before.items())
    with refused(ValueError, "restore_rowwise_subviews", "'_evil'"):
        storage.restore_rowwise_subviews(buffer, {"_evil": scale})
    for bad in (buffer.view(-1, 16), buffer.view(torch.int8), torch.ones(4)):
        with refused(ValueError, "restore_subview", "'buffer'", "flat uint8"):
            storage.restore_rowwise_subviews(bad, info)


@every_fp8
@pytest.mark.parametrize("kind", ["rowwise", "columnwise"])
def test_records_that_overlap(device, kind, name):
    """A scale whose record has the offset of the data would be read from the data's bytes."""
    made = FP8_FORMATS[name](device=device).multi_quantize([randn(32, 64, device=device)])[0]
    info = getattr(made, f"get_{kind}_subview_info")()
    buffer, before = buffer_of(parts_of(made)[next(iter(info))]), parts_of(made)
    data, scale = list(info)[:2]
    end = info[data].offset + 32 * 64
    for at in (info[data].offset, end - 16):
        with refused(ValueError, f"restore_{kind}_subviews", repr(data), repr(scale), "overlap"):
            getattr(made, f"restore_{kind}_subviews")(buffer, {**info, scale: info[scale]._replace(offset=at)})
        assert all(getattr(made, n) is p for n, p in before.items())
    getattr(made, f"restore_{kind}_subviews")(buffer, info)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
    shape=st.lists(st.integers(0, 5), max_size=3),
    at=st.integers(0, 6),
    start=st.integers(0, 3),
)
def test_any_view_comes_back(dtype, shape, at, start):
    """From a buffer that itself begins somewhere in its storage."""
    storage = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    wanted = storage[16 * at :].view(dtype)[: 2 * torch.Size(shape).numel()]
    wanted = wanted.as_strided(shape, [2 * s for s in torch.empty(shape).stride()], wanted.storage_offset())
    record = subview_of(wanted)
    moved = torch.cat([torch.zeros(16 * start, dtype=torch.uint8), storage])[16 * start :]
    got = restore_subview(moved, record)
    assert got.stride() == wanted.stride() and isinstance(record, Subview)
    assert_same_bits(*(t.clone(memory_format=torch.contiguous_format).view(-1) for t in (got, wanted)))
