"""Memory of stashed tensors as segments of bytes, with the regions in them whose rows are counted
(csrc/stash/stash_segments.h)."""

from __future__ import annotations

import torch

from transformer_engine.pytorch import _C

Segment = _C.StashSegment


def bytes_of(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """`count` bytes of the tensor's storage from `offset` on, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), offset, (count,))


def own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return bytes_of(tensor, tensor.storage_offset() * tensor.element_size(), tensor.nbytes)


def copy_originals(
    handle: _C.StashHandle, counted: list[tuple[torch.Tensor, torch.Tensor]], unit_rows: int, tail: str
) -> None:
    """Replaces the segments of stash() by copies while there is no pool: the caller may write to the originals."""
    for segment, (tensor, counter) in zip(handle.segments, counted, strict=True):
        segment.memory = _copy(tensor, counter, unit_rows, tail)


def _copy(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int, tail: str) -> torch.Tensor:
    """The bytes of the tensor with the tail that a reload would write, without reading the count on the host."""
    copy = own_bytes(tensor).clone()
    if tail != "keep" and copy.numel():
        rows = copy.view(tensor.shape[0], -1)
        past_live = torch.arange(len(rows), device=rows.device) >= counter.reshape(()).to(torch.int64) * unit_rows
        rows.masked_fill_(past_live[:, None], 0)
    return copy
