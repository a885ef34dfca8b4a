"""What one group stashed, from its store to its way back. When each step happens is the manager's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.lanes import Point
from transformer_engine.pytorch.stash.pool import Pool


class Owner(Protocol):
    """The step that a handle belongs to, as far as it is asked or told anything."""

    stash: object  # whose step it is

    def wanted(self, handle: Handle) -> None: ...

    def dropped(self, handle: Handle) -> None: ...


class Handle(_C.StashHandle):
    """Its state and its pieces are what each tensor asks for (csrc/stash_members.h). States: kept (nothing was copied),
    stored (its copy is under way or done, the originals are there), away, coming (its copy back is under way), back,
    gone."""

    scheduled = evicted = noted = False
    like: list[tuple[torch.dtype, torch.Size]] | None = None  # of the tensors that a caller handed over
    _pool: Pool | None = None
    _group: _C.StashGroup | None = None
    _stored: Point | None = None
    _back: Point | None = None

    def __init__(self, name: Hashable, key: Hashable, tail: str, step: Owner) -> None:
        super().__init__(name)
        self.key, self.tail, self.step = key, tail, step

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {self.state}, {len(self.pieces)} pieces)"

    def __del__(self) -> None:
        """Groups are told when nobody wants them any more; a caller's handle is what is wanted."""
        if self.like is not None and self.state in ("kept", "stored", "away"):
            self.step.dropped(self)

    def store(self, pool: Pool) -> None:
        """Its copy starts, behind what the current stream has been given."""
        if self.state != "kept" or not self.has_members():
            return
        self.check_counters()
        self._pool = pool
        self._group, self._stored = pool.store(self)
        self.state = "stored"

    def free(self) -> None:
        """The current stream waits for the copy; the originals are given up."""
        if self.state != "stored":
            return
        self._pool.lanes.wait(self._stored)
        self.check_counters()
        self._group.forget_members()
        self.free_originals()

    def start_load(self, keep: bool = False) -> None:
        """Its copy back starts, into memory of the current stream."""
        self.free()
        if self.state != "away":
            return
        self._group.bring(self)
        self._back = self._pool.load(self._group, self, keep, self._stored)
        self.state = "coming"

    def finish_load(self) -> None:
        """The current stream waits for the copy back."""
        self.start_load()
        if self.state == "coming":
            self._pool.lanes.wait(self._back)
            self.state = "back"

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

    def give_up(self) -> None:
        """It is over, and the pool knows."""
        super().give_up()
        self._group = None
