"""Where a thread is: in a forward that is going to be recomputed, in its recomputation, or in neither; and what the
first run leaves for the second. Runs are started elsewhere (distributed/recompute.py)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class FirstRun:
    """What the modules inside a first run leave for its recomputations: for each of them its entries, in order."""

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
    """Runs whose phases are said by hand: first runs and recomputations pair in the order of both, which their owner
    keeps (`left_in_order()`, a deque)."""

    @staticmethod
    def leave(owner: object, entry: object) -> None:
        owner.left_in_order().append(entry)

    @staticmethod
    def take(owner: object) -> object | None:
        left = owner.left_in_order()
        return left.popleft() if left else None


_BY_HAND = _ByHand()


class ContextKeeper:
    """Carries the context of a first run to its recomputations. quantization, which lies above the code that
    recomputes, registers the one of te.autocast as RecomputePhase.autocast."""

    def enabled(self) -> bool:
        """Whether the context is on in this thread."""
        return False

    def note(self) -> Callable[[], AbstractContextManager]:
        """Called in the first run; the result enters the same context again."""
        return nullcontext


class RecomputePhase(threading.local):
    """Where this thread is. Recomputations run on autograd's threads, several modules on several threads.

    A first run inside of another one leaves its entries to both; inside a recomputation it is one for its modules, and
    hands on what they take."""

    autocast = ContextKeeper()
    enabled = False
    recomputing = False
    _from: FirstRun | _ByHand = _BY_HAND
    _to: tuple[FirstRun | _ByHand, ...] = ()

    def leave(self, owner: object, entry: object) -> None:
        """In a first run: for the recomputations of it."""
        for run in self._to:
            run.leave(owner, entry)

    def take(self, owner: object) -> object | None:
        """In a recomputation: what the owner's call left, or None."""
        entry = self._from.take(owner)
        if entry is not None:
            self.leave(owner, entry)
        return entry


_phase = RecomputePhase()


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False, *, first_run: FirstRun | None = None
) -> Iterator[None]:
    """Says that the forward inside will be recomputed (activation_recompute), and that it is the second run of it
    (recompute_phase); `checkpoint` does so for both of its runs, and hands them one first_run. Without one, modules
    pair their first runs with recomputations in the order of both."""
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
    """Of this thread."""
    return _phase


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this thread is recomputing a forward."""
    return _phase.recomputing
