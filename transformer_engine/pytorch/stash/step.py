"""One step of a stash: which groups came by, which leaves, which comes back. What a group's tensors are is its own;
what comes by next is the schedule's."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Protocol

import torch

from transformer_engine.pytorch.stash.handle import Handle
from transformer_engine.pytorch.stash.pool import Pool
from transformer_engine.pytorch.stash.schedule import Entry, Operation, Schedule
from transformer_engine.pytorch.stash.sizes import Size


class Stash(Protocol):
    """What steps and groups ask of the stash that they belong to."""

    device: torch.device
    schedule: Schedule
    step: Step  # the one that runs
    low_water: int
    recorded_pages: dict[Hashable, int]

    def pool_now(self) -> Pool | None: ...


class Visit:
    """What lies between one pre_schedule and its post_schedule: the group, and its entry from then on."""

    handle: Handle | None = None
    entry: Entry | None = None


class Step:
    """From one reset() to the next. records: its order and sizes are noted."""

    def __init__(self, stash: Stash, records: bool) -> None:
        self.stash, self.records = stash, records
        self.visit: Visit | None = None
        self.passed = self.counted = False  # a group was opened; one of them had something to stash
        self.opened: Handle | None = None  # of the group that is open
        self.trace: list[Operation | Entry] = []  # of groups between schedulers their entries, of others what they do
        self.sizes: dict[Hashable, Size] = {}
        self.names: list[Hashable] = []  # of stores, by number
        self._microbatches: dict[Hashable, int] = {}
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._scheduled: dict[Hashable, Handle] = {}  # by their entry
        self._leaving: Handle | None = None  # its originals are there still

    def over(self) -> None:
        """The next step has started: nothing of this one comes back."""
        self._leaving = None
        self._scheduled.clear()
        for handle in list(self._handles):
            if handle.state not in ("kept", "back"):
                handle.give_up()

    def handle(self, name: Hashable, tail: str) -> Handle:
        """Of the group's next microbatch."""
        number = self._microbatches.get(name, 0)
        self._microbatches[name] = number + 1
        handle = Handle(name, (name, number), tail, self)
        self._handles.add(handle)
        return handle

    # ---- groups ----

    def open(self, name: Hashable, tail: str) -> Handle:
        if self.opened is not None:
            raise RuntimeError(
                f"PagedStash: group {name!r} is opened inside of group {self.opened.name!r}, wanted one behind the "
                "other: a tensor is one group's."
            )
        if self.visit is not None and self.visit.handle is not None:
            raise RuntimeError(
                f"PagedStash: group {name!r} is opened behind group {self.visit.handle.name!r} between one "
                "pre_schedule and its post_schedule, wanted one group there."
            )
        if self.visit is None:
            self.free_leaving()
        self.opened, self.passed = self.handle(name, tail), True
        return self.opened

    def exit(self, handle: Handle, failed: bool) -> None:
        self.opened = None
        if failed:
            self.visit = None
        elif self.visit is not None:
            self.visit.handle = handle
        else:
            self.measure(handle)
            self.note(handle, store=True)
            self.start(handle)

    def start(self, handle: Handle) -> None:
        """The group leaves, if there is anywhere to go yet."""
        pool = self.stash.pool_now()
        if pool is None or not handle.has_pieces:
            return
        if self._leaving is not None:
            self.free_leaving()
        handle.store(pool)
        if handle.state == "stored":
            self.names.append(handle.name)
            self._leaving = handle
            if self.stash.low_water and self.stash.schedule.known:
                self._evict_farthest(pool)

    def measure(self, handle: Handle) -> None:
        self.counted |= handle.has_pieces
        if self.records and handle.has_pieces:
            self.sizes[handle.key] = Size.of(handle.pieces)

    @property
    def whole(self) -> bool:
        """Whether all that came by came back."""
        away = set()
        for e in self.trace:
            store, key = (e.store, e.key) if isinstance(e, Operation) else (e.forward, e[1:])
            (away.add if store else away.discard)(key)
        return not away

    def free_leaving(self) -> None:
        """What is leaving has left."""
        handle, self._leaving = self._leaving, None
        if handle is not None:
            handle.free()

    def wanted(self, handle: Handle) -> None:
        """A backward reads it now."""
        if handle.state in ("stored", "away", "coming"):
            self.free_leaving()
            if handle.state == "away":
                self.note(handle, store=False)
            handle.finish_load()

    def dropped(self, handle: Handle) -> None:
        """Nobody wants anything of it any more."""
        if self._leaving is handle:
            self._leaving = None
        if handle.state != "coming":  # a group that nothing came back of was kept, or nobody wanted it
            self.note(handle, store=False)
        handle.let_go()

    def note(self, handle: Handle, store: bool) -> None:
        """Schedulers note their entries instead."""
        if self.records and not handle.scheduled and handle.noted != store and (handle.has_pieces or not store):
            handle.noted = store
            self.trace.append(Operation(store, handle.key))

    # ---- schedulers ----

    def before_forward(self) -> Visit:
        """Here the originals of the group before are freed, because the experts now allocate another set."""
        if self.visit is not None:
            raise RuntimeError("PagedStash.pre_schedule: called twice, wanted post_schedule behind the first one.")
        self.free_leaving()
        self.visit = Visit()
        return self.visit

    def after_forward(self) -> Visit:
        visit, self.visit = self.visit, None
        if visit is None or visit.handle is None:
            raise RuntimeError(
                "PagedStash.post_schedule: no group was closed since the last one, wanted pre_schedule, a group and "
                "post_schedule in this order."
            )
        handle = visit.handle
        handle.scheduled = True
        schedule = self.stash.schedule
        visit.entry = schedule.forward(handle.name)
        handle.key = visit.entry[1:]
        self._scheduled[handle.key] = handle
        self.measure(handle)
        if self.records:
            self.trace.append(visit.entry)
        following = schedule.next
        turns = following is not None and not following.forward
        if not turns or following[1:] != handle.key:  # else its own backward is next: it is kept
            self.start(handle)
        if turns:
            self.load_ahead()
        return visit

    def before_backward(self, visit: Visit) -> None:
        if self.stash.step is not self:  # a graph of a step that is over: no entry of the one that runs
            return
        self.stash.schedule.backward(visit.entry)
        if self.records:
            self.trace.append(visit.entry.turned)
        self.free_leaving()
        visit.handle.finish_load()

    def load_ahead(self) -> None:
        """The group whose backward is next starts to come back."""
        following = self.stash.schedule.next
        if self.stash.step is not self or following is None or following.forward:
            return
        handle = self._scheduled.get(following[1:])
        if handle is not None and handle.state == "away":
            handle.start_load()

    def _evict_farthest(self, pool: Pool) -> None:
        """Where few device pages would be free by the counts of the recorded step, the group whose backward is farthest
        goes to the host; the device, which has the real counts, may let it be."""
        pages, low = self.stash.recorded_pages, self.stash.low_water
        away = {k: h for k, h in self._scheduled.items() if h.state in ("stored", "away") and not h.evicted}
        free = pool.options["device_pages"] - sum(pages.get(key, 0) for key in away)
        for entry in reversed(self.stash.schedule.ahead()):
            if free >= low:
                return
            handle = None if entry.forward else away.get(entry[1:])
            if handle is not None:
                handle.evict(low)
                free += pages.get(handle.key, 0)
