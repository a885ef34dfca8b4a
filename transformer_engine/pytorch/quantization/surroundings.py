"""What is switched on around the code that asks: one instance, which contexts write and modules read. torch.compile
guards the attributes of an instance, not those of a class. It is the process's, as autograd's threads look too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.capture_flag import stream_captures
from transformer_engine.pytorch.quantization.delayed import Region
from transformer_engine.pytorch.quantization.products import Plan, plan_of


def get_default_recipe() -> Recipe:
    """What autocast uses when it is given none."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe  # an older name of it

_DEFAULT = get_default_recipe()


class Surroundings(NamedTuple):
    """Of a forward: what its recomputation needs to be the same again."""

    enabled: bool
    calibrating: bool
    recipe: Recipe | None
    group: object | None
    capturing: bool
    skip_weight_update: torch.Tensor | None


class State:
    """enabled, calibrating, recipe, group: of the innermost autocast. token: which autocast that is. region: what the
    outermost one has to update at its end. capturing: it belongs to a graph, whose owner updates scales."""

    def __init__(self) -> None:
        self.resets = 0
        self.reset()

    def reset(self) -> None:
        """As in a new process. Contexts that were entered before have ended: they put nothing back."""
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
        # Regions that a graph's owner updates by hand, oldest first; the limit is for owners that never do.
        self.waiting: deque[Region] = deque(maxlen=256)
        # quantized_model_init
        self.parameters = False
        self.parameters_recipe: Recipe | None = None
        self.preserve_high_precision = False
        # A graph's flag on the device: not 0, weights are not quantized again.
        self.skip_weight_update: torch.Tensor | None = None
        # What a captured forward uses of delayed scaling, for its replays: module -> (token, group), in its order.
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
        """Of a graph, by its owner's word or by the stream's, which torch.compile cannot ask."""
        if self.capturing or torch.compiler.is_compiling():
            return self.capturing
        return stream_captures()

    def chosen_recipe(self) -> Recipe:
        return _DEFAULT if self.recipe is None else self.recipe

    def chosen_plan(self) -> Plan:
        """Of the innermost autocast. Errors: for a recipe that cannot be honoured."""
        if self.plan is None:
            self.plan = plan_of(self.chosen_recipe())
        return self.plan

    def surroundings(self) -> Surroundings:
        said = self.enabled, self.calibrating, self.recipe, self.group
        return Surroundings(*said, self.capturing, self.skip_weight_update)

    @contextmanager
    def surrounded(self, by: Surroundings) -> Iterator[None]:
        """As a forward saw it, for the recomputation of it. The depth says that no autocast inside is the outermost."""
        before, resets = (self.surroundings(), self.token, self.plan), self.resets
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


STATE = State()
