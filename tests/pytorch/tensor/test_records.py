# Records of subviews, of every storage class: what leaves comes back as it was, and a record that is misaligned, out of
# range or of another kind of part is refused by name and changes nothing.
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import E4M3, E5M2, FORMATS, block2d, current, parts_of
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import packing
from transformer_engine.pytorch.tensor.subviews import Subview, buffer_of, restore_subview

USAGES = [{"rowwise": True, "columnwise": True}, {"rowwise": True}, {"columnwise": True}]
KINDS = ("rowwise", "columnwise")


def made(name, x, usages, internal, fp8_dtype=E4M3, device="cpu"):
    """A tensor of that format whose parts are in one buffer, between those of others."""
    usages = {kind: usages.get(kind, False) for kind in KINDS}
    if name == "hybrid":
        quantizers = [current(fp8_dtype, device), block2d(E5M2, device)]
        for quantizer, kind in zip(quantizers, KINDS, strict=True):
            quantizer.set_usage(**{k: k == kind for k in KINDS})
        halves = packing.quantize_into_one_buffer([x, x], quantizers)
        there = {f"{kind}_storage": half for kind, half in zip(KINDS, halves, strict=True)}
        there = {n: half if usages[n.removesuffix("_storage")] else None for n, half in there.items()}
        if internal:
            return te.HybridQuantizedTensorStorage(**there, fake_dtype=x.dtype)
        return te.HybridQuantizedTensor(shape=x.shape, dtype=x.dtype, **there)
    quantizer = FORMATS[name](fp8_dtype, device)
    quantizer.set_usage(**usages)
    quantizer.internal = internal
    return quantizer.multi_quantize([torch.ones(3, 8, device=device), x, torch.ones(7, 7, device=device)])[1]


def infos_of(t):
    return {kind: getattr(t, f"get_{kind}_subview_info")() for kind in KINDS}


def restore(t, buffer, infos):
    for kind, info in infos.items():
        if info is not None:
            getattr(t, f"restore_{kind}_subviews")(buffer, info)


sizes = st.one_of(st.integers(0, 3), st.integers(4, 40), st.sampled_from([127, 128, 129, 300]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(FORMATS)),
    shape=st.lists(sizes, min_size=1, max_size=2).flatmap(lambda s: st.sampled_from([s, [2, *s], [*s[:-1], 1, s[-1]]])),
    usages=st.sampled_from(USAGES),
    internal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    fp8_dtype=st.sampled_from([E4M3, E5M2]),
)
def test_whatever_leaves_comes_back(name, shape, usages, internal, dtype, fp8_dtype):
    """Class, nominal dtype, shape, usages; of each part dtype, shape, strides, place in the buffer, and the bits."""
    whole = made(name, randn(*shape).to(dtype), usages, internal, fp8_dtype)
    outside = (type(whole), whole.dtype, tuple(whole.shape), whole.get_usages())
    before = {n: (p.clone(), p.dtype, p.shape, p.stride(), p.storage_offset()) for n, p in parts_of(whole).items()}
    values, infos = whole.dequantize().clone(), infos_of(whole)
    assert {kind for kind, info in infos.items() if info} == {k for k, there in whole.get_usages().items() if there}
    buffer = buffer_of(next(iter(parts_of(whole).values())))
    moved = buffer.clone()
    _, whole = whole.prepare_for_saving()
    buffer.fill_(17)
    restore(whole, moved, infos)
    assert (type(whole), whole.dtype, tuple(whole.shape), whole.get_usages()) == outside
    after = parts_of(whole)
    assert set(after) == set(before)
    for field, (value, *told) in before.items():
        part = after[field]
        assert [part.dtype, part.shape, part.stride(), part.storage_offset()] == told, field
        assert_same_bits(part, value, field)
        assert part.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
    assert_same_bits(whole.dequantize(), values)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_that_share_memory_share_it_again(name, device):
    """A scale that both directions read is one scale afterwards, and what is written to a part is in the buffer."""
    whole = made(name, randn(16, 32, device=device), USAGES[0], True, device=device)
    infos = infos_of(whole)
    moved = buffer_of(next(iter(parts_of(whole).values()))).clone()
    whole.prepare_for_saving()
    restore(whole, moved, infos)
    for info, half in ((infos[k], getattr(whole, f"{k}_storage", whole)) for k in KINDS):
        for field, record in info.items():
            part = getattr(half, field)
            assert part.data_ptr() == moved.data_ptr() + record.offset
            part.flatten()[0] = 3
            assert restore_subview(moved, record).flatten()[0] == 3


def test_only_a_part_of_the_direction_that_comes_back_is_valid():
    """A columnwise half that was not restored is not there; a stale transpose stays stale when the rows come back."""
    whole = made("current", randn(5, 7), USAGES[0], True)
    infos, buffer = infos_of(whole), buffer_of(whole._data)
    whole.prepare_for_saving()
    whole.restore_rowwise_subviews(buffer, infos["rowwise"])
    assert whole.get_usages() == {"rowwise": True, "columnwise": False}
    whole.restore_columnwise_subviews(buffer, infos["columnwise"])
    assert whole.get_usages() == {"rowwise": True, "columnwise": True}
    empty = te.Float8TensorStorage(data=None, fp8_scale_inv=None, fp8_dtype=E4M3)
    empty.restore_columnwise_subviews(buffer, infos["columnwise"])
    assert empty.get_usages() == {"rowwise": False, "columnwise": True}
    whole._reset_caches()
    whole.restore_rowwise_subviews(buffer, infos["rowwise"])
    assert whole.get_usages() == {"rowwise": True, "columnwise": False}


def test_what_could_not_be_restored_has_no_record():
    """Memory of several buffers, a start that is not on 16 bytes, strides of no row."""
    data, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(1)
    buffer = torch.zeros(512, dtype=torch.uint8)
    inside = buffer[256:260].view(torch.float32)
    for rows, scale_inv in (
        (data, scale),
        (buffer[8:72].view(4, 16), inside),
        (buffer[:64].view(16, 4).t(), inside),
        (buffer[:64].view(4, 16), buffer[264:268].view(torch.float32)),
    ):
        t = te.Float8TensorStorage(data=rows, fp8_scale_inv=scale_inv, fp8_dtype=E4M3)
        assert t.get_rowwise_subview_info() is None
    t = te.Float8TensorStorage(data=buffer[:64].view(4, 16), fp8_scale_inv=inside, fp8_dtype=E4M3)
    assert t.get_rowwise_subview_info() and t.get_columnwise_subview_info() is None
    assert t.prepare_for_saving()[1].get_rowwise_subview_info() is None


# ---- what is refused ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_record_of_another_kind_of_part(name, kind):
    """A scale as bytes, data as floats, another shape, rows that overlap: each would be other values, silently."""
    whole = made(name, randn(16, 32), USAGES[0], True)
    half, infos = getattr(whole, f"{kind}_storage", whole), infos_of(whole)
    info, buffer, before = infos[kind], buffer_of(next(iter(parts_of(whole).values()))), parts_of(whole)
    for field, record in info.items():
        other = torch.float32 if record.dtype is torch.uint8 else torch.uint8
        wrong = [
            (record._replace(dtype=other, shape=record.shape, offset=0), f"wanted {record.dtype}"),
            (record._replace(dtype=torch.int32 if other is torch.uint8 else torch.int8), f"wanted {record.dtype}"),
            (record._replace(shape=(2, *record.shape), stride=(0, *record.stride)), "shape"),
            (record._replace(shape=record.shape[1:], stride=record.stride[1:]), "shape"),
        ]
        if "_hp_data" not in info:
            wrong.append((record._replace(stride=(0,) * len(record.shape)), "stride")) if record.shape != (1,) else None
        for bad, words in wrong:
            with refused(ValueError, f"restore_{kind}_subviews", repr(field), words):
                getattr(whole, f"restore_{kind}_subviews")(buffer, {**info, field: bad})
            assert all(parts_of(whole)[n] is p for n, p in before.items())
    other_direction = next((f for f in half._parts if f not in info), None)
    if other_direction is not None:
        with refused(ValueError, f"restore_{kind}_subviews", repr(other_direction)):
            getattr(whole, f"restore_{kind}_subviews")(buffer, {**info, other_direction: next(iter(info.values()))})


@pytest.mark.parametrize("offset", [1, 4, 8, 24, -16, 16.0, True, 2**63], ids=str)
def test_an_offset_is_checked(offset):
    """Data of bytes is on 16 bytes as well: products read it in vectors."""
    buffer = torch.zeros(256, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.float32):
        with refused(ValueError, "restore_subview", offset, "multiple of 16" if offset != 2**63 else "buffer of 256"):
            restore_subview(buffer, Subview(0, dtype, offset, (2,), (1,)))


@pytest.mark.parametrize(
    "shape, stride, words",
    [
        ((2, 2), (1,), "of no tensor"),
        ((-1,), (1,), "of no tensor"),
        ((2,), (-1,), "of no tensor"),
        ((2.0,), (1,), "of no tensor"),
        (3, 1, "of no tensor"),
        ((0, 2**70), (1, 1), "of no tensor"),
        ((2,), (2**70,), "of no tensor"),
        ((2**62, 2**62), (2**62, 1), "buffer of 256"),
        ((2,), (2**62,), "buffer of 256"),
        ((257,), (1,), "buffer of 256"),
        ((2,), (256,), "buffer of 256"),
    ],
    ids=str,
)
def test_a_view_is_inside_of_the_buffer(shape, stride, words):
    with refused(ValueError, "restore_subview", words):
        restore_subview(torch.zeros(256, dtype=torch.uint8), Subview(0, torch.uint8, 0, shape, stride))


def test_invalid_records_and_buffers():
    record, buffer = Subview(0, torch.uint8, 0, (2,), (1,)), torch.zeros(256, dtype=torch.uint8)
    for bad in (tuple(record), None, record._replace(dtype="uint8")):
        with refused(TypeError, "restore_subview", "record", "Subview"):
            restore_subview(buffer, bad)
    bad_buffers = [None, [0] * 256, buffer.int(), buffer.view(16, 16), buffer[::2], buffer[8:], buffer.to_sparse()]
    for bad in bad_buffers:
        with refused(ValueError, "restore_subview", "'buffer'", "flat uint8"):
            restore_subview(bad, record)
    # A buffer that ends where the record does is long enough; one byte less is not.
    assert restore_subview(buffer[:2], record).numel() == 2
    with refused(ValueError, "bytes 0 to 2", "buffer of 1"):
        restore_subview(buffer[:1], record)
    assert restore_subview(buffer[:0], Subview(0, torch.float32, 0, (0, 3), (3, 1))).shape == (0, 3)


def test_records_that_are_not_of_one_tensor():
    whole = made("block2d", randn(16, 32), USAGES[0], True)
    infos, buffer = infos_of(whole), buffer_of(whole._rowwise_data)
    op = "restore_rowwise_subviews"
    with refused(TypeError, op, "NoneType", "get_rowwise_subview_info"):
        whole.restore_rowwise_subviews(buffer, None)
    scale = infos["rowwise"]["_rowwise_scale_inv"]
    with refused(ValueError, op, "several buffers"):
        whole.restore_rowwise_subviews(
            buffer, {**infos["rowwise"], "_rowwise_scale_inv": scale._replace(buffer=scale.buffer + 16)}
        )
    with refused(ValueError, op, "on meta", "on cpu"):
        whole.restore_rowwise_subviews(buffer.to("meta"), infos["rowwise"])
    whole.prepare_for_saving()
    with refused(ValueError, op, "record of the data"):
        whole.restore_rowwise_subviews(buffer, {"_rowwise_scale_inv": scale})
    other = made("block2d", randn(32, 16), USAGES[0], True)  # whose columnwise data has the shape of these rows
    whole.restore_rowwise_subviews(buffer, infos["rowwise"])
    with refused(ValueError, "restore_columnwise_subviews", "shape", (32, 16)):
        whole.restore_columnwise_subviews(buffer_of(other._rowwise_data), infos_of(other)["columnwise"])
    tensor = made("block2d", randn(32, 16), USAGES[0], False)  # its shape is its own, whatever it holds
    tensor.prepare_for_saving()
    with refused(ValueError, op, "shape", (32, 16)):
        tensor.restore_rowwise_subviews(buffer, infos["rowwise"])


def test_a_hybrid_tensor_without_that_direction():
    whole = made("hybrid", randn(16, 32), {"rowwise": True}, True)
    infos, buffer = infos_of(whole), buffer_of(whole.rowwise_storage._data)
    assert infos["columnwise"] is None
    for _ in range(2):  # whole, and taken apart
        with refused(ValueError, "restore_columnwise_subviews", "columnwise_storage"):
            whole.restore_columnwise_subviews(buffer, infos["rowwise"])
        whole.prepare_for_saving()
