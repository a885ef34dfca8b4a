"""What groups of a step hold, as far as the host knows it: shapes at once, counts when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from transformer_engine.pytorch.stash.pieces import Piece

ALIGNMENT = 128  # of members in the stream of bytes that is cut into pages (transformer_engine/stash.h)


class Extent(NamedTuple):
    """One member: most units of unit_bytes; count: how many are alive, on the device; behind: how many units leave
    with these."""

    unit_bytes: int
    most: int
    count: torch.Tensor
    behind: int

    def bytes(self, worst: bool) -> int:
        alive = self.most if worst else int(self.count)
        return self.unit_bytes * (min(alive + self.behind, self.most) if alive > 0 else 0)


class Size(NamedTuple):
    """static: bytes of the storages that the group frees."""

    static: int
    extents: list[Extent]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Size:
        extents = []
        for piece in pieces:
            for r in piece.regions:
                extents.append(Extent(r.row_bytes * r.unit_rows, r.rows // r.unit_rows, r.counter.clone(), r.behind))
        return cls(sum(piece.bytes for piece in pieces), extents)

    def live(self, worst: bool = False) -> int:
        return sum(extent.bytes(worst) for extent in self.extents)

    def pages(self, page_bytes: int, worst: bool = False) -> int:
        stream = sum(-(-extent.bytes(worst) // ALIGNMENT) * ALIGNMENT for extent in self.extents)
        return -(-stream // page_bytes)
