"""The autocast in force: one instance for each thread, which contexts write and modules read. torch.compile guards the
attributes of an instance, not those of a class. As with torch.autocast a new thread starts with everything off, and a
backward uses the state of the thread that calls it, on whichever thread it runs."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch._internal.recompute_phase import ContextKeeper, RecomputePhase
from transformer_engine.pytorch._internal.torch_private import current_graph_task_id
from transformer_engine.pytorch.quantization.delayed import Region
from transformer_engine.pytorch.quantization.recipes.products import Plan, plan_of


def get_default_recipe() -> Recipe:
    """The recipe of an autocast without one."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe  # an older name

_DEFAULT = get_default_recipe()


class AutocastSnapshot(NamedTuple):
    """The state of a forward that its recomputation needs."""

    enabled: bool
    calibrating: bool
    recipe: Recipe | None
    group: object | None
    capturing: bool
    skip_weight_update: torch.Tensor | None


class AutocastState:
    """enabled, calibrating, recipe, group: of the innermost autocast. token: identifies that autocast. region: the
    states that the outermost autocast updates at its end. capturing: the autocast belongs to a graph, whose owner
    updates scales. thread: the number of its thread; 0: not assigned yet. borrowed: a copy for a backward of that
    thread that another thread runs; backward, outside: the backward's number, and the depth at its begin."""

    def __init__(self) -> None:
        self.thread = 0
        self.borrowed = False
        self.backward, self.outside = -1, 0
        self.resets = 0
        self.reset()

    def reset(self) -> None:
        """As in a new process. Contexts that were entered before count as ended: they restore nothing."""
        self.resets += 1
        self.enabled = False
        self.calibrating = False
        self.active = False
        self.recipe: Recipe | None = None
        self.group: object | None = None
        self.depth = 0
        self.token: object | None = None
        self.region: Region | None = None
        self.capturing = False
        self.plan: Plan | None = None
        # Regions that a graph's owner updates by hand, oldest first; the limit is for owners that never update.
        self.waiting: deque[Region] = deque(maxlen=256)
        # quantized_model_init
        self.parameters = False
        self.parameters_recipe: Recipe | None = None
        self.preserve_high_precision = False
        # A graph's flag on the device: if it is not 0, weights are not quantized again.
        self.skip_weight_update: torch.Tensor | None = None
        # The delayed scaling of a captured forward, for its replays: module -> (token, group), in order.
        self.noted: dict[object, tuple] | None = None

    def set(self, enabled: bool, calibrating: bool, recipe: Recipe | None, group: object | None) -> None:
        self.enabled = enabled
        self.calibrating = calibrating
        self.active = enabled or calibrating
        self.recipe = recipe
        self.group = group
        self.plan = None
        self.token = None if torch.compiler.is_compiling() else object()

    def in_capture(self) -> bool:
        """Whether a graph is being captured: by its owner's flag or by the stream, which torch.compile cannot ask."""
        if self.capturing or torch.compiler.is_compiling():
            return self.capturing
        return stream_captures()

    def chosen_recipe(self) -> Recipe:
        return _DEFAULT if self.recipe is None else self.recipe

    def chosen_plan(self) -> Plan:
        """The plan of the innermost autocast. Errors: for a recipe that is not supported."""
        if self.plan is None:
            self.plan = plan_of(self.chosen_recipe())
        return self.plan

    def snapshot(self) -> AutocastSnapshot:
        settings = self.enabled, self.calibrating, self.recipe, self.group
        return AutocastSnapshot(*settings, self.capturing, self.skip_weight_update)

    @contextmanager
    def restored(self, by: AutocastSnapshot) -> Iterator[None]:
        """Restores the state of a forward for its recomputation. The depth makes no autocast inside the outermost."""
        before, resets = (self.snapshot(), self.token, self.plan), self.resets
        self.set(*by[:4])
        self.capturing, self.skip_weight_update = by[4:]
        self.depth += 1
        try:
            yield
        finally:
            if self.resets == resets:
                self.depth -= 1
                self.set(*before[0][:4])
                self.capturing, self.skip_weight_update = before[0][4:]
                self.token, self.plan = before[1:]


class _ThreadState(threading.local):
    """state: the state that this thread's code reads. own: of this thread; the same object outside of a backward.
    borrowed: copies of the states of threads whose backwards this thread runs."""

    def __init__(self) -> None:  # torch.compile does not see class attributes
        self.state = self.own = AutocastState()
        self.borrowed: dict[int, AutocastState] = {}


THREAD = _ThreadState()
_states: weakref.WeakValueDictionary[int, AutocastState] = (
    weakref.WeakValueDictionary()
)  # by the numbers of their threads


def current_state() -> AutocastState:
    """The state of this thread; in a backward, the state of the thread that calls it."""
    state = THREAD.state
    if torch.compiler.is_compiling():
        return state
    if current_graph_task_id() != -1:
        return _of_caller()
    if state.thread == 0:
        state.thread = _C.this_thread()
        _states[state.thread] = state
    return state


class _AutocastKeeper(ContextKeeper):
    """Recomputations run under the autocast of their first run."""

    def enabled(self) -> bool:
        return current_state().enabled

    def note(self) -> Callable[[], AbstractContextManager]:
        snapshot = current_state().snapshot()
        return lambda: current_state().restored(snapshot)


RecomputePhase.autocast = _AutocastKeeper()


def _of_caller() -> AutocastState:
    """One thread of autograd runs the backwards of many threads, also nested: each backward gets a new copy of its
    caller's state, unless a context is open on the present copy."""
    own, caller = THREAD.own, _C.calling_thread()
    theirs = None if caller == own.thread else _states.get(caller)
    if theirs is None:
        THREAD.state = own
        return own
    state = THREAD.borrowed.get(caller)
    if state is None or (state.backward != current_graph_task_id() and state.depth == state.outside):
        for gone in [number for number in THREAD.borrowed if number not in _states]:
            del THREAD.borrowed[gone]
        state = THREAD.borrowed[caller] = copy.copy(theirs)
        state.borrowed, state.backward, state.outside = True, current_graph_task_id(), theirs.depth
    THREAD.state = state
    return state
