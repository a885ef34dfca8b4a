"""The order of the forwards and backwards of groups in a step. It gives the next backward, which groups are stored
and which are loaded ahead. Plain data, no tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.graph.capture.order import FORWARD, WGRAD, pipeline_schedule

OP = "PagedStash"


class Entry(NamedTuple):
    """The forward or backward of a group. microbatch: number of earlier forwards of the group in the step."""

    forward: bool
    name: Hashable
    microbatch: int

    @property
    def turned(self) -> Entry:
        """The backward of a forward, and the reverse."""
        return Entry(not self.forward, self.name, self.microbatch)

    def __str__(self) -> str:
        return f"the {'forward' if self.forward else 'backward'} of group {self.name!r}, microbatch {self.microbatch}"


class Schedule(_C.StashSchedule):
    """The entries of a step, recorded in the first step and compared in later ones. An order that is known from the
    start numbers its layers; the first group in the place of a layer keeps the layer's number.
    csrc/stash/stash_schedule.h passes an entry that is the expected one; _pass() handles all others."""

    def __init__(self, order: Sequence[int | float] | None = None, layers_per_chunk: int | Sequence[int] = 1) -> None:
        super().__init__()
        self.entries = [] if order is None else _entries_of(order, layers_per_chunk)
        self.known = self.numbered = order is not None
        self.endless = False  # no reset() ends the step that is recorded: its entries are dropped
        self._numbered: dict[Hashable, int] | None = None if order is None else {}

    @property
    def next(self) -> Entry | None:
        """The next entry, by the caller's names; None where the schedule is unknown or at its end."""
        if not self.known or self.position >= len(self.entries):
            return None
        entry = self.entries[self.position]
        return entry if self._numbered is None else self._in_names(entry)

    def ahead(self) -> list[Entry]:
        """The next entry and all later ones, by the caller's names."""
        return [self._in_names(entry) for entry in self.entries[self.position :]] if self.known else []

    def leaves(self, name: Hashable) -> bool:
        """Whether a group is stored in its first microbatch: it stays where its backward follows directly. True where
        the schedule is unknown."""
        ahead = [self._in_names(entry) for entry in self.entries] if self.known else []
        for entry, following in pairwise([*ahead, None]):
            if entry == Entry(True, name, 0):
                return following != entry.turned
        return True

    def restart(self, unfinished: bool = False) -> str:
        """Starts a new step and returns a warning where the old one ended early, else "". unfinished: the entries
        recorded in the old step are no schedule."""
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
            return f"{OP}: the step that was recorded ended before {missing}; the next step is recorded instead."
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
            expected = "the step is over" if wanted is None else f"wanted {self._in_names(wanted)}"
            raise RuntimeError(
                f"{OP}: {entry} came as entry {self.position} of the schedule, {expected}. Each step has to run in the "
                "same order and with the same number of microbatches; reset(record=True) records a new schedule. Run "
                "passes outside of training steps, such as a validation, under torch.no_grad()."
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
    """store: takes pages; else gives them back."""

    store: bool
    key: Hashable


def operations(entries: Iterable[Entry]) -> list[Operation]:
    """The stores and loads of a step of these entries: a group whose own backward is next is not stored, and a stored
    group is loaded one entry before its backward."""
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
    """The first load of a group while a group that was stored later is still away."""
    away = []
    for step in steps:
        if step.store:
            away.append(step.key)
        elif step.key in away and away.pop() != step.key:
            return step
    return None
