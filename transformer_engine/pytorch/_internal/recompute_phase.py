"""The phase of a thread: in a forward that will be recomputed, in its recomputation, or in neither; and the entries
that the first run leaves for the second. distributed/recompute.py starts the runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from transformer_engine.pytorch._internal.torch_private import current_graph_task_id


class FirstRun:
    """Entries that the modules inside a first run leave for its recomputations, in order for each module."""

    def __init__(self) -> None:
        self._entries: dict[int, list] = {}
        self._taken: dict[int, int] = {}

    def leave(self, owner: object, entry: object) -> None:
        self._entries.setdefault(id(owner), []).append(entry)

    def take(self, owner: object) -> object | None:
        """The owner's next entry, or None. A recomputation that stops early is followed by one from the start."""
        taken = self._taken.get(id(owner), 0)
        entries = self._entries.get(id(owner), ())
        self._taken[id(owner)] = taken + 1
        return entries[taken] if taken < len(entries) else None

    def rewind(self) -> None:
        self._taken = {}


class _ByHand:
    """Runs whose phases the caller sets: first runs and recomputations pair in order, in a deque of their owner
    (`left_in_order()`)."""

    @staticmethod
    def leave(owner: object, entry: object) -> None:
        owner.left_in_order().append(entry)

    @staticmethod
    def take(owner: object) -> object | None:
        left = owner.left_in_order()
        return left.popleft() if left else None


_BY_HAND = _ByHand()


class ContextKeeper:
    """Carries the context of a first run to its recomputations. quantization, a higher layer than the code that
    recomputes, registers the keeper of te.autocast as RecomputePhase.autocast."""

    def enabled(self) -> bool:
        """Whether the context is on in this thread."""
        return False

    def note(self) -> Callable[[], AbstractContextManager]:
        """Called in the first run; the result enters the same context again."""
        return nullcontext


class RecomputePhase(threading.local):
    """The phase of this thread. Recomputations run on autograd's threads, several modules on several threads.

    A first run inside another one leaves its entries to both; inside a recomputation it is a first run for its modules,
    and passes on the entries that they take."""

    autocast = ContextKeeper()
    enabled = False
    recomputing = False
    _from: FirstRun | _ByHand = _BY_HAND
    _to: tuple[FirstRun | _ByHand, ...] = ()

    def leave(self, owner: object, entry: object) -> None:
        """In a first run: leaves an entry for its recomputations."""
        for run in self._to:
            run.leave(owner, entry)

    def take(self, owner: object) -> object | None:
        """In a recomputation: the entry that the owner's call left, or None."""
        entry = self._from.take(owner)
        if entry is not None:
            self.leave(owner, entry)
        return entry


_phase = RecomputePhase()


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False, *, first_run: FirstRun | None = None
) -> Iterator[None]:
    """Marks the forward inside as one that will be recomputed (activation_recompute), and as the second run
    (recompute_phase); `checkpoint` marks both of its runs, and passes one first_run to them. Without first_run, modules
    pair their first runs with recomputations in order."""
    run = _BY_HAND if first_run is None else first_run
    before = _phase.enabled, _phase.recomputing, _phase._from, _phase._to
    if not activation_recompute or recompute_phase:
        now = activation_recompute, recompute_phase, run, ()
    elif _phase.recomputing:
        now = True, True, _phase._from, (*_phase._to, run)
    else:
        now = True, False, run, (*_phase._to, run)
    _phase.enabled, _phase.recomputing, _phase._from, _phase._to = now
    try:
        yield
    finally:
        _phase.enabled, _phase.recomputing, _phase._from, _phase._to = before


def recompute_phase() -> RecomputePhase:
    """The phase of this thread."""
    return _phase


def is_recomputed() -> bool:
    """Whether a forward of this thread is a recomputation: by the phase, or inside of a backward, where
    torch.utils.checkpoint runs the second forwards of its functions, which have no phase."""
    return _phase.recomputing or (not torch.compiler.is_compiling() and current_graph_task_id() != -1)


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this thread is recomputing a forward."""
    return _phase.recomputing
