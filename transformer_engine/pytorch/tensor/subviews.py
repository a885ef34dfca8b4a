"""Parts of tensors that share one byte buffer, as records, and back. A record holds bytes and a dtype, never an offset
in elements of another dtype: a scale read as bytes would silently have another value. Nothing is copied here."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE, PartSpec, untransposed

ALIGNMENT = 16  # bytes: the alignment of each part in a buffer of several, for vector loads
VALUES = "values"  # the kind of plain values, with the layout that their owner chose
_INDEX_MAX = 2**63 - 1


class Subview(NamedTuple):
    """The place of a tensor in a buffer. buffer: its identity (the address of its storage); offset: in bytes."""

    buffer: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def subview_of(t: torch.Tensor) -> Subview:
    return Subview(
        t.untyped_storage().data_ptr(),
        t.dtype,
        t.storage_offset() * t.element_size(),
        tuple(t.shape),
        tuple(t.stride()),
    )


def buffer_of(t: torch.Tensor) -> torch.Tensor:
    """The whole storage under t, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _are_extents(values: object) -> bool:
    return isinstance(values, Sequence) and all(type(n) is int and 0 <= n <= _INDEX_MAX for n in values)


def _bytes_of(record: Subview) -> int:
    """The bytes that a record covers from its offset on."""
    if not all(record.shape):
        return 0
    return (sum((n - 1) * s for n, s in zip(record.shape, record.stride)) + 1) * record.dtype.itemsize


def _check_record(record: Subview, name: str) -> None:
    """Raises for a record that describes no tensor in any buffer."""
    op = "restore_subview"
    if not isinstance(record, Subview) or not isinstance(record.dtype, torch.dtype):
        raise TypeError(f"{op}: {name} is {record!r:.200}, wanted a Subview, as subview_of() makes it.")
    wanted = max(ALIGNMENT, record.dtype.itemsize)
    if type(record.offset) is not int or record.offset < 0 or record.offset % wanted:
        raise ValueError(
            f"{op}: {name}'s offset {record.offset!r} is not aligned to {record.dtype}, wanted a multiple of {wanted}, "
            "from 0 on; records of subview_of() hold bytes, not elements."
        )
    extents = _are_extents(record.shape) and _are_extents(record.stride)
    if not extents or len(record.shape) != len(record.stride):
        raise ValueError(
            f"{op}: {name}'s shape {record.shape!r:.200} and stride {record.stride!r:.200} are of no tensor, wanted as "
            "many strides as sizes, ints from 0 on."
        )


def restore_subview(buffer: torch.Tensor, record: Subview, name: str = "record") -> torch.Tensor:
    """The view of `buffer` that `record` describes, in its own dtype. name: the record's, for messages.

    Errors: TypeError unless it is a Subview; ValueError for a buffer that is not flat bytes, an offset that is not
    aligned to the dtype and to 16 bytes, and a view that exceeds the buffer."""
    op = "restore_subview"
    _check_record(record, name)
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.dtype is torch.uint8
    if not plain or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"{op}: argument 'buffer' is {_described(buffer)}, wanted contiguous flat uint8 that starts on {ALIGNMENT} "
            "bytes; buffer_of() gives it."
        )
    end = record.offset + _bytes_of(record)
    if end > buffer.numel():
        raise ValueError(
            f"{op}: bytes {record.offset} to {end} are outside of a buffer of {buffer.numel()} for {name}; pass the "
            "whole buffer that it was recorded from."
        )
    typed = buffer[record.offset : end].view(record.dtype)
    return typed.as_strided(record.shape, record.stride, typed.storage_offset())


def _described(buffer: object) -> str:
    if not isinstance(buffer, torch.Tensor):
        return f"a {type(buffer).__name__}"
    start = f" from {buffer.storage_offset()} on" if buffer.layout is torch.strided and buffer.storage_offset() else ""
    return f"a {type(buffer).__name__} of {buffer.dtype} and shape {tuple(buffer.shape)}{start}"


def _rows_in_order(record: Subview) -> bool:
    """Row after row, with any pitch: no element overlaps another."""
    least = 1
    for n, stride in zip(reversed(record.shape), reversed(record.stride)):
        if n > 1:
            if stride < least:
                return False
            least = n * stride
    return True


def _misfit(record: Subview, spec: PartSpec) -> str:
    """Why a part of this kind cannot have this record; empty if it can."""
    if record.dtype is not spec.dtype:
        return f"its dtype is {record.dtype}, wanted {spec.dtype}"
    if tuple(record.shape) != tuple(spec.shape):
        return f"its shape is {tuple(record.shape)}, wanted {tuple(spec.shape)}"
    if not all(record.shape) or spec.kind == VALUES:
        return ""
    if spec.kind not in DATA and _bytes_of(record) != torch.Size(record.shape).numel() * record.dtype.itemsize:
        return f"its stride is {tuple(record.stride)}, wanted contiguous {tuple(record.shape)}"
    if not _rows_in_order(record):
        return f"its stride is {tuple(record.stride)}, wanted row after row of {tuple(record.shape)}"
    return ""


def _overlap(records: Mapping[str, Subview]) -> tuple[str, str] | None:
    """Two records that share a byte, which one of them would read as another dtype."""
    covered = sorted((r.offset, r.offset + n, name) for name, r in records.items() if (n := _bytes_of(r)))
    for (_, end, first), (start, _, second) in itertools.pairwise(covered):
        if start < end:
            return first, second
    return None


class Subviews:
    """The subviews of a quantized storage in one buffer."""

    _beside_parts: tuple[str, ...] = ("_amax",)  # fields that a buffer may hold besides the parts

    def _subview_names(self, kind: str) -> list[str]:
        return [*self._of_direction(kind), *self._names("scale"), *self._names(VALUES), *self._beside_parts]

    def _subview_specs(self, kind: str, shape: Sequence[int]) -> dict[str, PartSpec]:
        """The spec of each record of that direction."""
        specs = self._specs(tuple(shape), {name: getattr(self, name) for name in self._details})
        specs["_amax"] = PartSpec("amax", torch.float32, (1,))
        return {name: specs[name] for name in self._subview_names(kind)}

    def _subview_info(self, kind: str) -> dict[str, Subview] | None:
        if not self.get_usages()[kind]:
            return None
        parts = {n: t for n in self._subview_names(kind) if (t := getattr(self, n, None)) is not None}
        if any(type(t) is not torch.Tensor or t.layout is not torch.strided for t in parts.values()):
            return None
        records = {n: subview_of(t) for n, t in parts.items()}
        if len({record.buffer for record in records.values()}) != 1:
            return None
        specs = self._subview_specs(kind, self.size())
        fit = all(r.offset % ALIGNMENT == 0 and not _misfit(r, specs[n]) for n, r in records.items())
        return records if fit and _overlap(records) is None else None

    def _shape_of_records(self, op: str, info: Mapping[str, Subview]) -> Sequence[int]:
        """The tensor's shape: its own, or if it holds nothing, the one in the record of the data."""
        if isinstance(self, torch.Tensor) or any(self.get_usages().values()):
            return self.size()
        for name, record in info.items():
            part = self._kind(name) if name in self._parts else ""
            if part in (ROWWISE, VALUES):
                return tuple(record.shape)
            if part == COLUMNWISE:
                return untransposed(tuple(record.shape))
        raise ValueError(f"{op}: argument 'info' names {list(info)}, wanted a record of the data as well.")

    def _restore_subviews(self, kind: str, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        op, known = f"{type(self).__name__}.restore_{kind}_subviews", self._subview_names(kind)
        if not isinstance(info, Mapping):
            raise TypeError(
                f"{op}: argument 'info' is a {type(info).__name__}, wanted the result of get_{kind}_subview_info(), "
                "unless that was None."
            )
        for name in info:
            if name not in known:
                raise ValueError(f"{op}: argument 'info' names {name!r}, wanted {known}.")
            _check_record(info[name], repr(name))
        if len({record.buffer for record in info.values()}) > 1:
            raise ValueError(
                f"{op}: argument 'info' has records of several buffers, wanted those of one; restore each buffer's "
                "part of the tensor by restore_from_saved."
            )
        specs = self._subview_specs(kind, self._shape_of_records(op, info))
        for name, record in info.items():
            if why := _misfit(record, specs[name]):
                raise ValueError(f"{op}: argument 'info' has a record {name!r} that does not fit this part: {why}.")
        if pair := _overlap(info):
            first, second = pair
            raise ValueError(
                f"{op}: argument 'info' has records {first!r}, at byte {info[first].offset}, and {second!r}, at byte "
                f"{info[second].offset}, that overlap; pass the result of get_{kind}_subview_info()."
            )
        restored = {name: restore_subview(buffer, record, repr(name)) for name, record in info.items()}
        others = {t.device for n, t in self._tensors().items() if n not in info}
        if isinstance(self, torch.Tensor):
            others.add(self.device)
        if others - {buffer.device}:
            raise ValueError(
                f"{op}: argument 'buffer' is on {buffer.device}, but the tensor is on "
                f"{sorted(map(str, others - {buffer.device}))[0]}; move the buffer there first."
            )
        for name, tensor in restored.items():
            setattr(self, name, tensor)
        self._restored(kind)

    def _restored(self, kind: str) -> None:
        """The parts of that direction are present again."""

    def get_rowwise_subview_info(self) -> dict[str, Subview] | None:
        """{field: record} of the rowwise direction; None if its parts do not share a buffer, or are not stored in it on
        16 bytes and row after row."""
        return self._subview_info(ROWWISE)

    def get_columnwise_subview_info(self) -> dict[str, Subview] | None:
        """{field: record} of the columnwise direction; None if its parts do not share a buffer, or are not stored in it
        on 16 bytes and row after row."""
        return self._subview_info(COLUMNWISE)

    def restore_rowwise_subviews(self, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        """Takes its rowwise parts from `buffer`. Errors: ValueError, and nothing is changed, for records that do not
        fit the buffer or this format's parts: dtype, shape, strides, device."""
        self._restore_subviews(ROWWISE, buffer, info)

    def restore_columnwise_subviews(self, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        """Takes its columnwise parts from `buffer`. Errors: ValueError, and nothing is changed, for records that do not
        fit the buffer or this format's parts: dtype, shape, strides, device."""
        self._restore_subviews(COLUMNWISE, buffer, info)
