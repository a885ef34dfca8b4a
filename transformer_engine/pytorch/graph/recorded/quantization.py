"""Quantization around captures: scaling states are saved and restored, and weights have a flag on the device.

- Nothing is quantized here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.graph.describe import short_repr
from transformer_engine.pytorch.graph.memory.buffers import version_of
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import autocast
from transformer_engine.pytorch.quantization.module.quantization import DIRECTIONS
from transformer_engine.pytorch.quantization.recipes.products import Plan
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class WeightFlag:
    """A flag on the device: unless it is 0, the graphs of one capture use the quantized weights that exist.

    - It is independent of the flags of the modules, which may be created and dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.float32, device=device)
        self._first = True
        self._versions: dict[int, int | None] = {}  # of each weight, by id, when it was quantized

    def set(self, first: bool, weights: list[torch.nn.Parameter]) -> None:
        """Called before a replay of a callable with these weights. first: the replay quantizes them."""
        if first:
            self.record(weights)
        if first is not self._first:
            self.tensor.fill_(0.0 if first else 1.0)
            self._first = first

    def record(self, weights: list[torch.nn.Parameter]) -> None:
        """Records that the quantized weights are made from the present values."""
        for p in weights:
            self._versions[id(p)] = version_of(p)

    def versions(self, weights: list[torch.nn.Parameter]) -> list[int | None]:
        """The versions of the weights from which the quantized ones were made."""
        return [self._versions.get(id(p)) for p in weights]


def our_modules(module: object) -> list[TransformerEngineBaseModule]:
    """The modules of this library that a callable contains."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [part for part in module.modules() if isinstance(part, TransformerEngineBaseModule)]


def _scaling_states(part: TransformerEngineBaseModule) -> list:
    return [part.runtime.scaling_states().get(key) for key in DIRECTIONS]


def _parts(op: str, modules: Iterable[object]) -> list[TransformerEngineBaseModule]:
    listed = [modules] if isinstance(modules, torch.nn.Module) else modules
    if not isinstance(listed, Iterable):
        raise ValueError(f"{op}: argument 'modules' is {short_repr(modules)}, wanted a module, or several.")
    listed = list(listed)
    for module in listed:
        if not callable(module):
            raise ValueError(f"{op}: argument 'modules' has {short_repr(module)}, wanted modules.")
    return [part for module in listed for part in our_modules(module)]


def save_fp8_tensors(modules: Iterable[object], recipe: Recipe | None) -> list | None:
    """A copy of the present scales and histories of delayed scaling of all modules of this library in `modules`; None
    for a recipe without them.

    Errors: ValueError if an argument is not a module or not a recipe."""
    parts = _parts("save_fp8_tensors", modules)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(
            f"save_fp8_tensors: argument 'recipe' is {short_repr(recipe)}, wanted a recipe of "
            "transformer_engine.common.recipe, or None."
        )
    if recipe is not None and not (recipe.delayed() or recipe.custom()):
        return None
    saved = []
    for part in parts:
        states = _scaling_states(part)
        saved.append([None if s is None else (s.rule, s.scale.clone(), s.amax_history.clone()) for s in states])
    return saved


def _fits(part: TransformerEngineBaseModule, saved: object) -> bool:
    """Whether it was saved for such a module; the length of the history may differ."""
    if not isinstance(saved, list) or len(saved) != len(DIRECTIONS):
        return False
    pairs = [(state, values) for state, values in zip(_scaling_states(part), saved) if state and values]
    return all(
        scale.shape == state.scale.shape and history.shape[1:] == state.amax_history.shape[1:]
        for state, (_, scale, history) in pairs
    )


@torch.no_grad()
def restore_fp8_tensors(modules: Iterable[object], fp8_tensors: list | None) -> None:
    """Restores the result of save_fp8_tensors for the same modules, in the memory that graphs read. Scales that did not
    exist then get their initial values. After a change of the recipe they are as eager's change leaves them.

    Errors: ValueError if it was saved for other modules; nothing is changed then."""
    parts = _parts("restore_fp8_tensors", modules)
    if fp8_tensors is None:
        return
    if not isinstance(fp8_tensors, list):
        raise ValueError(
            f"restore_fp8_tensors: argument 'fp8_tensors' is {short_repr(fp8_tensors)}, wanted the result of "
            "save_fp8_tensors."
        )
    if len(parts) != len(fp8_tensors) or not all(map(_fits, parts, fp8_tensors)):
        raise ValueError(
            f"restore_fp8_tensors: argument 'fp8_tensors' was saved for {len(fp8_tensors)} other modules, 'modules' "
            f"has {len(parts)}; pass the modules that it was saved for, in the same order."
        )
    for part, saved in zip(parts, fp8_tensors):
        for state, values in zip(_scaling_states(part), saved):
            if state is None:
                continue
            new = state.rule, torch.ones_like(state.scale), torch.zeros_like(state.amax_history)
            state.take(*(values or new))


class UsedScales(NamedTuple):
    """A module whose scales a captured forward uses, the group, and whether an autocast inside the forward sets it."""

    part: TransformerEngineBaseModule
    inside: bool
    group: object | None


class Quantization:
    """A context manager around a captured forward: the autocast of the capture, and the flag of its weights."""

    def __init__(self, arguments: tuple, weight_flag: WeightFlag | None) -> None:
        self.arguments, self.weight_flag = arguments, weight_flag
        self.used = any(arguments[:2])  # enabled, calibrating
        self.group = arguments[3]
        self.used_scales: list[UsedScales] = []  # of the latest forward, in the order in which eager enters them
        self.plan: Plan | None = None  # of the recipe, if a module was quantized by it
        autocast(*self.arguments, _graph=True)  # raises for a wrong recipe

    @contextmanager
    def __call__(self, parts: list[TransformerEngineBaseModule]) -> Iterator[None]:
        for part in parts:
            part.runtime.quantization.enter_anew()
            for state in _scaling_states(part):
                if state is not None:
                    state.changed()  # so that the copy of scales for a recomputation is made inside the graph
        state = current_state()
        before = state.skip_weight_update, state.noted
        state.skip_weight_update = None if self.weight_flag is None else self.weight_flag.tensor
        noted = state.noted = {}
        try:
            with autocast(*self.arguments, _graph=True):
                own = state.token
                yield
                self.plan = state.plan if state.enabled else None
                known = {id(part) for part in parts}
                found = [(part, *entry) for part, entry in noted.items() if id(part) in known]
                self.used_scales = [UsedScales(part, token is not own, group) for part, token, group in found]
        finally:
            state.skip_weight_update, state.noted = before
            for part in parts:
                for state in _scaling_states(part):
                    if state is not None:
                        state.changed()
