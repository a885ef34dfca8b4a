"""Memory that is stashed, as pieces of bytes and the regions in them whose rows are counted. Nothing is copied here."""

from __future__ import annotations

from typing import NamedTuple

import torch


def bytes_of(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """`count` bytes of its storage from `offset` on."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), offset, (count,))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """[start, end) in bytes of its storage."""
    size = tensor.element_size()
    if tensor.is_contiguous():
        start = tensor.storage_offset() * size
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() * size, (tensor.storage_offset() + last + 1) * size


class Region(NamedTuple):
    """Rows of row_bytes, one behind the other from `offset` on, in bytes of a piece's memory."""

    offset: int
    rows: int
    row_bytes: int
    counter: torch.Tensor
    unit_rows: int
    version: int  # of the counter, when it was said

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.row_bytes


class Piece:
    """Memory of which regions are stashed: the original until it is freed, then what came back."""

    __slots__ = ("bytes", "memory", "regions")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor | None = memory  # uint8, one dimension
        self.bytes = memory.numel()
        self.regions: list[Region] = []
