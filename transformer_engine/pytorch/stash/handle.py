"""What one group stashed, from its store to its way back. When each step happens is the manager's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from transformer_engine.pytorch.stash.lanes import Point
from transformer_engine.pytorch.stash.pieces import Piece
from transformer_engine.pytorch.stash.pool import Pool


class Owner(Protocol):
    """The step that a handle belongs to, as far as it is asked or told anything."""

    stash: object  # whose step it is

    def wanted(self, handle: Handle) -> None: ...

    def dropped(self, handle: Handle) -> None: ...


class Handle:
    """States: kept (nothing was copied), stored (its copy is under way or done, the originals are there), away, coming
    (its copy back is under way), back, gone."""

    def __init__(self, name: Hashable, key: Hashable, tail: str, step: Owner) -> None:
        self.name, self.key, self.tail, self.step = name, key, tail, step
        self.state = "kept"
        self.pieces: list[Piece] = []
        self.freed: list[Callable[[], None]] = []  # told when the originals are given up
        self.scheduled = self.evicted = self.noted = False
        self.like: list[tuple[torch.dtype, torch.Size]] | None = None  # of the tensors that a caller handed over
        self._pool: Pool | None = None
        self._group = None
        self._stored: Point | None = None
        self._back: Point | None = None

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {self.state}, {len(self.pieces)} pieces)"

    def __del__(self) -> None:
        """Groups are told when nobody wants them any more; a caller's handle is what is wanted."""
        if getattr(self, "like", None) is not None and self.state in ("kept", "stored", "away"):
            self.step.dropped(self)

    def store(self, pool: Pool) -> None:
        """Its copy starts, behind what the current stream has been given."""
        if self.state != "kept":
            return
        self.pieces = [p for p in self.pieces if p.memory is not None]  # else wanted by nobody any more
        regions = [
            (i, r.offset, r.rows, r.row_bytes, r.unit_rows) for i, p in enumerate(self.pieces) for r in p.regions
        ]
        if not regions:
            return
        self._check_counters()
        counters = [r.counter for p in self.pieces for r in p.regions]
        self._pool = pool
        self._group, self._stored = pool.store([p.memory for p in self.pieces], regions, counters, self.tail, self.name)
        self.state = "stored"

    def free(self) -> None:
        """The current stream waits for the copy; the originals are given up."""
        if self.state != "stored":
            return
        self._pool.lanes.wait(self._stored)
        self._check_counters()
        self._group.forget_members()
        for piece in self.pieces:
            piece.memory = None
        for tell in self.freed:
            tell()
        self.freed.clear()
        self.state = "away"

    def start_load(self, keep: bool = False) -> None:
        """Its copy back starts, into memory of the current stream."""
        self.free()
        if self.state != "away":
            return
        targets = self._group.targets()
        for piece, memory in zip(self.pieces, targets, strict=True):
            piece.memory = memory
        self._back = self._pool.load(self._group, targets, keep, self._stored, self.name)
        self.state = "coming"

    def finish_load(self) -> None:
        """The current stream waits for the copy back."""
        self.start_load()
        if self.state == "coming":
            self._pool.lanes.wait(self._back)
            self.state = "back"

    def park(self) -> None:
        """What came back is somebody else's; the pages are still there."""
        for piece in self.pieces:
            piece.memory = None
        self.state = "away"

    def evict(self, low_water: int) -> None:
        """Its pages move to the host where fewer than low_water are free."""
        self._pool.evict(self._group, low_water, self.name)
        self.evicted = True

    def let_go(self) -> None:
        """Nobody wants it any more: pages that it has go back, memory that is being copied is waited for."""
        if self.state == "coming":
            self._pool.lanes.wait(self._back)
        if self.state in ("stored", "away"):  # a drop is behind the store, so that this waits for both
            self._pool.lanes.wait(self._pool.drop(self._group, self._stored, self.name))
        self.give_up()

    def refusal(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"PagedStash: group {self.name!r} is wanted by {who}, and its pages are gone: a reload gave them "
            "back, or a reset() or close() did. Reload it once, keep=True for more, before the next reset()."
        )

    def _check_counters(self) -> None:
        for piece in self.pieces:
            for r in piece.regions:
                if r.counter._version != r.version:
                    raise RuntimeError(
                        f"PagedStash: the counter of a tensor of group {self.name!r} was changed in place while the "
                        "group was leaving: its rows are counted then. Give each group a counter of its own."
                    )

    def give_up(self) -> None:
        """It is over, and the pool knows."""
        self.pieces, self.freed, self._group, self.state = [], [], None, "gone"
