"""Tensors that a caller hands over where there is no pool yet: the caller may write into the originals from then on.
The rest is csrc/stash/stash_front.cpp's."""

from __future__ import annotations

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.pieces import own_bytes


def keep_copies(
    handle: _C.StashHandle, counted: list[tuple[torch.Tensor, torch.Tensor]], unit_rows: int, tail: str
) -> None:
    for piece, (tensor, counter) in zip(handle.pieces, counted, strict=True):
        piece.memory = _copied(tensor, counter, unit_rows, tail)


def _copied(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int, tail: str) -> torch.Tensor:
    """Its bytes, with the tail that a reload would write; the host knows no count."""
    copy = own_bytes(tensor).clone()
    if tail != "keep" and copy.numel():
        rows = copy.view(tensor.shape[0], -1)
        behind = torch.arange(len(rows), device=rows.device) >= counter.reshape(()).to(torch.int64) * unit_rows
        rows.masked_fill_(behind[:, None], 0)
    return copy
