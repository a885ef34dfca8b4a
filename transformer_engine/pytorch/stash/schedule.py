"""In which order groups come by in a step, and what that says: whose backward is next, what leaves, what comes back.
Plain data: no tensor is seen here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.graph.capture.order import FORWARD, WGRAD, pipeline_schedule

OP = "PagedStash"


class Entry(NamedTuple):
    """A group's forward or backward; microbatch: how many forwards of that group came before in the step."""

    forward: bool
    name: Hashable
    microbatch: int

    @property
    def turned(self) -> Entry:
        return Entry(not self.forward, self.name, self.microbatch)

    def __str__(self) -> str:
        return f"the {'forward' if self.forward else 'backward'} of group {self.name!r}, microbatch {self.microbatch}"


class Schedule(_C.StashSchedule):
    """The entries of a step: recorded in the first one, matched in those behind it. An order that is known from the
    start names its layers by number; the first group that comes by in a layer's place has its number for good. An
    entry that is the next one passes by in csrc/stash/stash_schedule.h; others come here."""

    def __init__(self, order: Sequence[int | float] | None = None, layers_per_chunk: int | Sequence[int] = 1) -> None:
        super().__init__()
        self.entries = [] if order is None else _entries_of(order, layers_per_chunk)
        self.known = self.numbered = order is not None
        self.endless = False  # no reset() ends the step that is recorded: its entries are not kept
        self._numbered: dict[Hashable, int] | None = None if order is None else {}

    @property
    def next(self) -> Entry | None:
        """What comes by next, in the caller's names; None: not known, or nothing."""
        if not self.known or self.position >= len(self.entries):
            return None
        entry = self.entries[self.position]
        return entry if self._numbered is None else self._in_names(entry)

    def ahead(self) -> list[Entry]:
        """What comes by from here on, in the caller's names."""
        return [self._in_names(entry) for entry in self.entries[self.position :]] if self.known else []

    def leaves(self, name: Hashable) -> bool:
        """Whether a group leaves in its first microbatch, as far as that is known: not where its backward is next."""
        ahead = [self._in_names(entry) for entry in self.entries] if self.known else []
        for entry, following in pairwise([*ahead, None]):
            if entry == Entry(True, name, 0):
                return following != entry.turned
        return True

    def restart(self, unfinished: bool = False) -> str:
        """A new step; unfinished: what was recorded of the old one is no schedule. What is said of the old one where it
        ended early."""
        missing = self.next if self.position else None
        self.begin()
        self.endless = False
        if missing is not None:
            return f"{OP}: the step ended before {missing}, entry {self._at} of its schedule."
        if self.known or not self.entries:
            return ""
        if unfinished:
            missing = next((e.turned for e in self.entries if e.turned not in self.entries), None)
            self.entries = []
            return f"{OP}: the step that was recorded ended before {missing}; the next one is recorded."
        self.known = True
        return ""

    def _pass(self, entry: Entry) -> None:
        if not self.known:
            if not self.endless:
                self.entries.append(entry)
            return
        wanted = self.entries[self.position] if self.position < len(self.entries) else None
        same = wanted == entry if self._numbered is None or wanted is None else self._is_numbered(wanted, entry)
        if not same:
            self._at = self.position
            said = "the step is over" if wanted is None else f"wanted {self._in_names(wanted)}"
            raise RuntimeError(
                f"{OP}: {entry} came as entry {self.position} of the schedule, {said}. Each step has to run in the "
                "same order and with as many microbatches; after reset(record=True) a step is recorded anew. What is "
                "no part of it, a validation say, runs under torch.no_grad()."
            )
        self.position += 1
        self._at = self.position

    def _is_numbered(self, wanted: Entry, entry: Entry) -> bool:
        free = entry.name not in self._numbered and wanted.name not in self._numbered.values()
        if wanted.forward and entry.forward and free:
            self._numbered[entry.name] = wanted.name
        return wanted == entry._replace(name=self._numbered.get(entry.name, entry.name))

    def _in_names(self, entry: Entry) -> Entry:
        if self._numbered is None:
            return entry
        names = {number: name for name, number in self._numbered.items()}
        return entry._replace(name=names.get(entry.name, entry.name))


def _entries_of(order: Sequence[int | float], layers_per_chunk: int | Sequence[int]) -> list[Entry]:
    chunks = max((int(abs(c)) for c in order), default=1)
    modules = sum(layers_per_chunk) if isinstance(layers_per_chunk, Sequence) else layers_per_chunk * chunks
    steps = pipeline_schedule(order, layers_per_chunk, modules, [True] * modules).steps
    samples: dict[int, list[int]] = {}
    for step in steps:
        if step.kind == FORWARD:
            samples.setdefault(step.module, []).append(step.sample)
    return [
        Entry(step.kind == FORWARD, step.module, samples[step.module].index(step.sample))
        for step in steps
        if step.kind != WGRAD
    ]


class Operation(NamedTuple):
    """store: pages are taken; else they are given back."""

    store: bool
    key: Hashable


def operations(entries: Iterable[Entry]) -> list[Operation]:
    """What a step of these entries does: a group whose own backward is next is not stored; the one whose backward is
    next is loaded ahead."""
    entries, done, away = list(entries), [], set()

    def load(entry: Entry | None) -> None:
        if entry is not None and not entry.forward and entry[1:] in away:
            away.remove(entry[1:])
            done.append(Operation(False, entry[1:]))

    for i, entry in enumerate(entries):
        following = entries[i + 1] if i + 1 < len(entries) else None
        if entry.forward and following != entry.turned:
            away.add(entry[1:])
            done.append(Operation(True, entry[1:]))
        elif not entry.forward:
            load(entry)
        load(following)
    return done


def not_last_in(steps: Iterable[Operation]) -> Operation | None:
    """The first group that comes back while one that was stored behind it is still away."""
    away = []
    for step in steps:
        if step.store:
            away.append(step.key)
        elif step.key in away and away.pop() != step.key:
            return step
    return None
