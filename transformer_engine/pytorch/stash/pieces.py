"""Memory that is stashed, as pieces of bytes and the regions in them whose rows are counted
(csrc/stash/stash_handle.h). Nothing is copied here."""

from __future__ import annotations

import torch

from transformer_engine.pytorch import _C

Piece = _C.StashPiece  # memory of which regions are stashed: the original until it is freed, then what came back


def bytes_of(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """`count` bytes of its storage from `offset` on."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), offset, (count,))


def own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Those of a contiguous tensor."""
    return bytes_of(tensor, tensor.storage_offset() * tensor.element_size(), tensor.nbytes)
