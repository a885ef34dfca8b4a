"""Parts of tensors that share one byte buffer, as records, and back. A record holds bytes and a dtype, never an
offset in elements of something else: a scale read as bytes would be silently another one. Nothing is copied here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Subview(NamedTuple):
    """Where a tensor lies in a buffer. buffer: which one (the address of its storage); offset: in bytes."""

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


def restore_subview(buffer: torch.Tensor, record: Subview) -> torch.Tensor:
    """The view of `buffer` that `record` describes, in its own dtype.

    Errors: ValueError for a buffer that is not flat bytes, an offset that is not aligned to the dtype, and a view that
    leaves the buffer."""
    op = "restore_subview"
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"{op}: argument 'buffer' is {buffer.dtype} of shape {tuple(buffer.shape)}, wanted contiguous flat uint8."
        )
    size = record.dtype.itemsize
    if (buffer.storage_offset() + record.offset) % size or record.offset < 0:
        raise ValueError(f"{op}: offset {record.offset} is not aligned to {record.dtype}, wanted a multiple of {size}.")
    if len(record.shape) != len(record.stride) or min((*record.shape, *record.stride, 0)) < 0:
        raise ValueError(f"{op}: shape {record.shape} and stride {record.stride} are of no tensor.")
    span = 0
    if all(record.shape):
        span = (sum((n - 1) * s for n, s in zip(record.shape, record.stride)) + 1) * size
    if record.offset + span > buffer.numel():
        raise ValueError(
            f"{op}: bytes {record.offset} to {record.offset + span} are wanted of a buffer of {buffer.numel()}."
        )
    typed = buffer[record.offset : record.offset + span].view(record.dtype)
    return typed.as_strided(record.shape, record.stride, typed.storage_offset())


class Subviews:
    """What a quantized storage says of itself as subviews of one buffer."""

    _beside_parts: tuple[str, ...] = ("_amax",)  # fields that a buffer may hold beside the parts

    def _subview_names(self, kind: str) -> list[str]:
        shared = self._names("scale")
        return self._of_direction(kind) + shared + [n for n in self._beside_parts if n in self.__dict__]

    def _subview_info(self, kind: str) -> dict[str, Subview] | None:
        records = {n: subview_of(t) for n in self._subview_names(kind) if (t := getattr(self, n)) is not None}
        if not self.get_usages()[kind] or len({record.buffer for record in records.values()}) != 1:
            return None
        return records

    def _restore_subviews(self, kind: str, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        known: Sequence[str] = [*self._parts, *self._beside_parts]
        for name in info:
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__}.restore_{kind}_subviews: argument 'info' names {name!r}, wanted {known}."
                )
        restored = {name: restore_subview(buffer, record) for name, record in info.items()}
        for name, tensor in restored.items():
            setattr(self, name, tensor)

    def get_rowwise_subview_info(self) -> dict[str, Subview] | None:
        """{field: record} of the rowwise direction; None where its parts do not share a buffer."""
        return self._subview_info("rowwise")

    def get_columnwise_subview_info(self) -> dict[str, Subview] | None:
        """{field: record} of the columnwise direction; None where its parts do not share a buffer."""
        return self._subview_info("columnwise")

    def restore_rowwise_subviews(self, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        """Takes its rowwise parts from `buffer`. Errors: ValueError, and nothing is changed, for records that do not
        fit it."""
        self._restore_subviews("rowwise", buffer, info)

    def restore_columnwise_subviews(self, buffer: torch.Tensor, info: Mapping[str, Subview]) -> None:
        """Takes its columnwise parts from `buffer`. Errors: ValueError, and nothing is changed, for records that do
        not fit it."""
        self._restore_subviews("columnwise", buffer, info)
