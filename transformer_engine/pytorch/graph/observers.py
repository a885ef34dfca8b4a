"""Observers of captures: code with steps, and streams, of its own, such as a stash, and code whose weights come late,
such as data parallelism. Nothing is captured here."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.graph.memory.replay_order import ReplayOrder


@dataclass(frozen=True)
class Observer:
    """pass_begins: before each pass over the captured callables, which is a step: an iteration of the warm-up, the
    captures, and the work after them. capture_ends: inside of each capture, before it ends: it has to join streams.
    captured: after the captures; orders their replays where they depend on each other (ReplayOrder.tie())."""

    pass_begins: Callable[[], None]
    capture_ends: Callable[[], None]
    captured: Callable[[ReplayOrder], None]


_observers: list[Observer] = []


def observe_captures(observer: Observer) -> None:
    _observers.append(observer)


def pass_begins() -> None:
    for observer in _observers:
        observer.pass_begins()


def capture_ends() -> None:
    for observer in _observers:
        observer.capture_ends()


def captured(order: ReplayOrder) -> None:
    for observer in _observers:
        observer.captured(order)


# ---- weights that come late ----

WeightWait = Callable[[], None]

_finders: list[Callable[[Sequence[torch.Tensor]], Sequence[WeightWait]]] = []


def find_weight_waits(find: Callable[[Sequence[torch.Tensor]], Sequence[WeightWait]]) -> None:
    """find(parameters): functions that wait until these are whole. They run before the captures of what reads them, and
    before each replay: hooks of modules in a graph do not run there."""
    _finders.append(find)


def weight_waits(parameters: Sequence[torch.Tensor]) -> tuple[WeightWait, ...]:
    return tuple(wait for find in _finders for wait in find(parameters))


# ---- events for work outside of a graph ----


class RecordedEvents:
    """Of one capture. recorded: returns the handles of the events that it has recorded so far, in any order."""

    def __init__(self, recorded: Callable[[], Sequence[Hashable]]) -> None:
        self._recorded = recorded
        self._early: Counter[Hashable] = Counter()

    def result_made(self) -> None:
        self._early = Counter(self._recorded())

    def after_results(self) -> frozenset[Hashable]:
        return frozenset(Counter(self._recorded()) - self._early)


class _ThreadState(threading.local):
    events: RecordedEvents | None = None


_thread = _ThreadState()


@contextmanager
def events_of_capture(recorded: Callable[[], Sequence[Hashable]]) -> Iterator[RecordedEvents]:
    """Around a capture of this thread."""
    before, _thread.events = _thread.events, RecordedEvents(recorded)
    try:
        yield _thread.events
    finally:
        _thread.events = before


def result_made() -> None:
    """Called inside of a capture by code that makes a result of the callable: an event that was recorded before it does
    not mark the end of the results."""
    if _thread.events is not None:
        _thread.events.result_made()
