"""Named random states besides the default one, and snapshots of all of them. It draws no numbers itself and never waits
for a device."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from transformer_engine.pytorch import _C

DEFAULT_NAME = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Random states by name; inside `fork(name)` the default generator runs on that state.

    With CUDA they are states of the CUDA generator of the current device, and fork swaps them by their graph-safe
    handles, also in a capture (register the result of get_all_rng_states() with the graph first). On a machine without
    CUDA they are states of the CPU generator.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Removes every state."""
        self.states_: dict[str, torch.Generator] = {}
        self.seeds_: set[int] = set()
        _add(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _add(self)

    def get_states(self) -> dict[str, torch.Tensor]:
        """A snapshot: name -> the bytes of the state. Drawing numbers does not change it; torch.save stores it."""
        states = {name: _C.get_random_state(generator) for name, generator in self.states_.items()}
        name = _drawing["cpu"].name_of(self)
        if name in states:  # the default generator has a copy of it, and has advanced
            states[name] = _C.get_random_state(torch.default_generator)
        return states

    def set_states(self, states: Mapping[str, torch.Tensor | torch.Generator]) -> None:
        """Restores a snapshot; generators stay the same objects, so that graphs with them follow."""
        generators = {}
        for name, state in states.items():
            generators[name] = self.states_.get(name) or _new_generator()
            if isinstance(state, torch.Generator):
                state = _C.get_random_state(state)
            _C.set_random_state(generators[name], state)
        self.states_ = generators
        name = _drawing["cpu"].name_of(self)
        if name in generators:
            _C.set_random_state(torch.default_generator, _C.get_random_state(generators[name]))

    def add(self, name: str, seed: int) -> None:
        """Adds the state that seeding the default generator with `seed` would give.

        Errors: ValueError if a state has the seed or the name.
        """
        if seed in self.seeds_:
            raise ValueError(
                f"CudaRNGStatesTracker.add: argument 'seed' is {seed}, which another state has; two states of one seed "
                "draw the same numbers. Pass another seed."
            )
        if name in self.states_:
            raise ValueError(
                f"CudaRNGStatesTracker.add: argument 'name' is {name!r}, which exists already; wanted a new name, or "
                "reset() first."
            )
        self.states_[name] = _new_generator().manual_seed(seed)
        self.seeds_.add(seed)

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Iterator[None]:
        """Draws from state `name` inside the block, and from the former state after it, also after an exception."""
        if name not in self.states_:
            raise ValueError(
                f"CudaRNGStatesTracker.fork: argument 'name' is {name!r}, wanted one of {sorted(self.states_)}; "
                "add(name, seed) first."
            )
        if _guard.active:
            raise _drawn()
        generator = self.states_[name]
        if generator.device.type == "cpu":
            with self._on_cpu(name):
                yield
            return
        device = torch.cuda.current_device()  # initialises CUDA; before that there are no generators
        default = torch.cuda.default_generators[device]
        outside = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)  # they share one state now: each draw advances it
        try:
            with _drawing[device].of(self, name):
                yield
        finally:
            default.graphsafe_set_state(outside)

    @contextmanager
    def _on_cpu(self, name: str) -> Iterator[None]:
        """As above by copies of the bytes: the CPU generator has no handles. Forks nest freely, also of other
        trackers."""
        before, around = _C.get_random_state(torch.default_generator), _drawing["cpu"].generator()
        if around is not None:
            _C.set_random_state(around, before)
        _C.set_random_state(torch.default_generator, _C.get_random_state(self.states_[name]))
        try:
            with _drawing["cpu"].of(self, name):
                yield
        finally:
            if name in self.states_:  # reset() and set_states() may have removed it
                _C.set_random_state(self.states_[name], _C.get_random_state(torch.default_generator))
            _C.set_random_state(torch.default_generator, before if around is None else _C.get_random_state(around))


class _Fork:
    """A tracker and a name, or None for both. Equal to no other one, so that list.remove() calls no Python code."""

    __slots__ = ("name", "tracker")

    def __init__(self, tracker: CudaRNGStatesTracker | None, name: str | None) -> None:
        self.tracker, self.name = tracker, name


_NO_FORK = _Fork(None, None)


class _Drawing:
    """Of one default generator: the forks that it is in. Threads may fork it at once: each access is one operation."""

    def __init__(self) -> None:
        self.forks: list[_Fork] = []

    def _last(self) -> _Fork:
        return (self.forks[-1:] or [_NO_FORK])[0]

    def name_of(self, tracker: object) -> str | None:
        """The name of this tracker's state that is drawn from."""
        last = self._last()
        return last.name if last.tracker is tracker else None

    def generator(self) -> torch.Generator | None:
        """The state that is drawn from."""
        last = self._last()
        return None if last.tracker is None else last.tracker.states_.get(last.name)

    @contextmanager
    def of(self, tracker: CudaRNGStatesTracker | None, name: str | None) -> Iterator[None]:
        self.forks.append(fork := _Fork(tracker, name))
        try:
            yield
        finally:  # the last one, unless threads have forked one generator concurrently
            self.forks.remove(fork)


# By device: "cpu", or the index of a CUDA one.
_drawing: defaultdict[str | int, _Drawing] = defaultdict(_Drawing)


@contextmanager
def _in_no_fork() -> Iterator[None]:
    """For the device of the current code. The caller restores the states afterwards."""
    with ExitStack() as stack:
        stack.enter_context(_drawing["cpu"].of(None, None))
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            if _drawing[device].generator() is not None:  # the default generator shares its state
                default = torch.cuda.default_generators[device]
                stack.callback(default.graphsafe_set_state, default.graphsafe_get_state())
                default.graphsafe_set_state(torch.Generator(default.device))
            stack.enter_context(_drawing[device].of(None, None))
        yield


def _new_generator() -> torch.Generator:
    return torch.Generator("cuda" if torch.cuda.is_available() else "cpu")


_trackers: weakref.WeakSet[CudaRNGStatesTracker] = weakref.WeakSet()
_adding = threading.Lock()


def _add(tracker: CudaRNGStatesTracker) -> None:
    with _adding:
        _trackers.add(tracker)


def trackers() -> list[CudaRNGStatesTracker]:
    """All existing trackers."""
    with _adding:
        return list(_trackers)


def trackers_of(modules: Iterable[torch.nn.Module]) -> list:
    """All existing trackers, and those that modules were given, which may be of a caller's own class."""
    found: list = trackers()
    for module in modules:
        for part in module.modules():
            get = getattr(part, "get_rng_state_tracker", None)
            if callable(get):
                found.append(get())
    return list({id(t): t for t in found if hasattr(t, "get_states") and hasattr(t, "set_states")}.values())


def get_all_rng_states() -> dict[str, torch.Generator]:
    """Name -> live generator, of all existing trackers: register them with a CUDA graph before its capture
    (`graph.register_generator_state`). A name of several trackers is numbered: "name", "name (2)"."""
    states: dict[str, torch.Generator] = {}
    for tracker in trackers():
        for name, generator in tracker.states_.items():
            unique, turn = name, 1
            while unique in states:
                turn += 1
                unique = f"{name} ({turn})"
            states[unique] = generator
    return states


class _Guard(threading.local):
    active = False  # this thread may draw nothing


_guard = _Guard()


def _drawn() -> NotImplementedError:
    return NotImplementedError(
        "checkpoint: its function draws random numbers inside a CUDA graph's capture, where the states of the "
        "generators cannot be recorded for the second run; that is not available in this version. Capture it without "
        "dropout, or without checkpoint."
    )


# By device: a generator without a graph, so that torch refuses to draw from it in a capture. Made before a capture.
_unknown: dict[int, torch.Generator] = {}


def prepare_no_draws() -> None:
    """Call it before a capture on the current device in which NoDraws is used."""
    device = torch.cuda.current_device()
    if device not in _unknown:
        _unknown[device] = torch.Generator(torch.device("cuda", device))


class NoDraws:
    """Replaces a Snapshot inside a CUDA graph's capture, where no state can be read: the code inside may draw no
    numbers, so that a second run gives the same result.

    Errors: NotImplementedError without prepare_no_draws()."""

    @contextmanager
    def replayed(self) -> Iterator[None]:
        device = torch.cuda.current_device()
        if device not in _unknown:
            raise NotImplementedError(
                "checkpoint: called inside a CUDA graph's capture that make_graphed_callables did not begin, where the "
                "states of the random generators cannot be recorded; that is not available in this version. Capture "
                "with make_graphed_callables, or without checkpoint."
            )
        default = torch.cuda.default_generators[device]
        outside, before = default.graphsafe_get_state(), _guard.active
        default.graphsafe_set_state(_unknown[device])
        _guard.active = True
        try:
            yield
        except RuntimeError as error:
            if "not in capture mode" in str(error):
                raise _drawn() from error
            raise
        finally:
            _guard.active = before
            default.graphsafe_set_state(outside)


class AsTheyCome:
    """Replaces a Snapshot if the same numbers are not needed again: nothing is recorded or restored."""

    @staticmethod
    def replayed() -> AbstractContextManager[None]:
        return nullcontext()


class Snapshot:
    """The present random states that a block of work may draw from: the CPU's, CUDA's on the devices of `tensors`,
    `devices` and the current one (if CUDA is in use), and those of a tracker with get_states and set_states."""

    def __init__(
        self, tensors: Iterable[torch.Tensor] = (), tracker: object | None = None, devices: Iterable[int] = ()
    ) -> None:
        self.cpu = _C.get_random_state(torch.default_generator)
        self.cuda: dict[int, torch.Tensor] = {}
        if torch.cuda.is_initialized():
            drawn = {t.device.index for t in tensors if t.device.type == "cuda"}
            drawn |= {torch.cuda.current_device(), *devices}
            self.cuda = {index: _C.get_random_state(torch.cuda.default_generators[index]) for index in sorted(drawn)}
        self.tracker = tracker
        self.tracked = None if tracker is None else tracker.get_states()
        devices = ["cpu", *([torch.cuda.current_device()] if self.cuda else [])]
        names = [_drawing[device].name_of(tracker) for device in devices] if tracker is not None else []
        self.inside = next((name for name in names if name is not None), None)  # the tracker's present fork

    def _now(self) -> "Snapshot":
        return Snapshot((), self.tracker, self.cuda)

    def restore(self) -> None:
        """Restores every state."""
        _C.set_random_state(torch.default_generator, self.cpu)
        for index, state in self.cuda.items():
            _C.set_random_state(torch.cuda.default_generators[index], state)
        if self.tracker is not None:
            self.tracker.set_states(self.tracked)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, numbers are drawn from the states of the snapshot, in the tracker's fork of that time; afterwards the
        states are as if the block had drawn nothing."""
        now = self._now()
        try:
            with _in_no_fork():
                self.restore()
                with nullcontext() if self.inside is None else self.tracker.fork(self.inside):
                    yield
        finally:
            now.restore()
