"""One pool on one device, and the order of its calls: which point a store, a load or a drop runs behind. Sizes, when
something is stashed and what of it comes back are the manager's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.lanes import LOAD, STORE, Lanes, Point

POLICIES = {"ring": 0, "stack": 1, "bump": 2}
TAILS = {"keep": 0, "tile": 1, "zero": 2}
MOST_MEMBERS = 16


class Pool:
    """Its memory, and the points behind which its next calls run. Loads and drops count as loads."""

    def __init__(self, device: torch.device, lanes: Lanes, **options: object) -> None:
        self.device, self.lanes, self.options = device, lanes, options
        self.native = _C.StashPool(device, stream=lanes.current(), **options)
        self._started = lanes.now("started")
        self._stored: Point | None = None
        self._loaded: Point | None = None
        self.stored_groups = 0  # since the last reset

    @property
    def gate(self) -> torch.Tensor:
        return self.native.gate

    def store(self, handle: _C.StashHandle) -> tuple[_C.StashGroup, Point]:
        """Starts to copy the regions of its pieces, of which counter * unit_rows rows are alive, behind what the
        current stream has been given. They stay as they are until the point."""
        group = _C.StashGroup(self.native, handle, TAILS[handle.tail])
        behind = [self.lanes.now("produced"), self._started]
        if self._loaded is not None:
            behind.append(self._loaded)
        work = partial(group.store, self.stored_groups)
        self._stored = self.lanes.run(STORE, work, f"store {handle.name}", behind)
        self.stored_groups += 1
        return group, self._stored

    def load(self, group: _C.StashGroup, handle: _C.StashHandle, keep: bool, stored: Point) -> Point:
        """Starts to copy them back, into the memory of its pieces, which the current stream may have used before."""
        return self._load(partial(group.load, handle, keep), stored, f"load {handle.name}")

    def drop(self, group: _C.StashGroup, stored: Point, what: Hashable) -> Point:
        """Its pages are given back unread."""
        return self._load(group.drop, stored, f"drop {what}")

    def _load(self, work: Callable[[int], None], stored: Point, what: str) -> Point:
        behind = [self.lanes.now("room"), stored]
        if self.native.load_waits and self._stored is not None:
            behind.append(self._stored)
        self._loaded = self.lanes.run(LOAD, work, what, behind)
        return self._loaded

    def evict(self, group: _C.StashGroup, low_water: int, what: Hashable) -> None:
        """Its pages move to the host where few are free: behind every call before it, before those behind it."""
        behind = [point for point in (self._loaded, self._stored) if point is not None]
        point = self.lanes.run(STORE, partial(group.evict, low_water), f"evict {what}", behind)
        self._stored = self._loaded = point

    def join(self) -> None:
        """The current stream waits for everything so far."""
        for point in (self._stored, self._loaded):
            if point is not None:
                self.lanes.wait(point)

    def report(self, mailbox: torch.Tensor) -> None:
        """The report of everything so far is in the mailbox. Waits for the device."""
        self.join()
        self.native.post(mailbox, self.lanes.current())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def reset(self, mailbox: torch.Tensor) -> None:
        """The next step starts; the report of this one goes to the mailbox."""
        self.join()
        stream = self.lanes.current()
        self.native.post(mailbox, stream)
        self.native.reset(stream)
        self._started, self._stored, self._loaded = self.lanes.now("started"), None, None
        self.stored_groups = 0
