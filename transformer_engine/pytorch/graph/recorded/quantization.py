"""Quantization around captures: what modules know about it is saved and put back. Quantizes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.graph.describe import shown
from transformer_engine.pytorch.graph.recorded.weight_flag import WeightFlag
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import autocast
from transformer_engine.pytorch.quantization.module.quantization import DIRECTIONS
from transformer_engine.pytorch.quantization.recipes.products import Plan
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


def our_modules(module: object) -> list[TransformerEngineBaseModule]:
    """The modules of this library in a callable."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [part for part in module.modules() if isinstance(part, TransformerEngineBaseModule)]


def _scaling_states(part: TransformerEngineBaseModule) -> list:
    return [part.runtime.scaling_states().get(key) for key in DIRECTIONS]


def _parts(op: str, modules: Iterable[object]) -> list[TransformerEngineBaseModule]:
    listed = [modules] if isinstance(modules, torch.nn.Module) else modules
    if not isinstance(listed, Iterable):
        raise ValueError(f"{op}: argument 'modules' is {shown(modules)}, wanted a module, or several.")
    listed = list(listed)
    for module in listed:
        if not callable(module):
            raise ValueError(f"{op}: argument 'modules' has {shown(module)}, wanted modules.")
    return [part for module in listed for part in our_modules(module)]


def save_fp8_tensors(modules: Iterable[object], recipe: Recipe | None) -> list | None:
    """The scales and histories of delayed scaling of all modules of this library in `modules`, as they are now; None
    for a recipe that has none.

    Errors: ValueError where these are no modules, and no recipe."""
    parts = _parts("save_fp8_tensors", modules)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(
            f"save_fp8_tensors: argument 'recipe' is {shown(recipe)}, wanted a recipe of "
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
    """Whether it was saved for such a module: a history of another length does."""
    if not isinstance(saved, list) or len(saved) != len(DIRECTIONS):
        return False
    pairs = [(state, values) for state, values in zip(_scaling_states(part), saved) if state and values]
    return all(
        scale.shape == state.scale.shape and history.shape[1:] == state.amax_history.shape[1:]
        for state, (_, scale, history) in pairs
    )


@torch.no_grad()
def restore_fp8_tensors(modules: Iterable[object], fp8_tensors: list | None) -> None:
    """Puts back what save_fp8_tensors returned for the same modules, in the memory that a graph knows; scales that did
    not exist then are as new. Where the recipe is another one since, as eager's switch to it leaves them.

    Errors: ValueError where it was saved for other modules, before anything is changed."""
    parts = _parts("restore_fp8_tensors", modules)
    if fp8_tensors is None:
        return
    if not isinstance(fp8_tensors, list):
        raise ValueError(
            f"restore_fp8_tensors: argument 'fp8_tensors' is {shown(fp8_tensors)}, wanted what save_fp8_tensors gave."
        )
    if len(parts) != len(fp8_tensors) or not all(map(_fits, parts, fp8_tensors)):
        raise ValueError(
            f"restore_fp8_tensors: argument 'fp8_tensors' is of {len(fp8_tensors)} other modules, 'modules' has "
            f"{len(parts)}; pass those that it was saved for, in the same order."
        )
    for part, saved in zip(parts, fp8_tensors):
        for state, values in zip(_scaling_states(part), saved):
            if state is None:
                continue
            new = state.rule, torch.ones_like(state.scale), torch.zeros_like(state.amax_history)
            state.take(*(values or new))


class Noted(NamedTuple):
    """A module whose scales a captured forward uses, under which group, and whether that is of an autocast inside."""

    part: TransformerEngineBaseModule
    inside: bool
    group: object | None


class Quantization:
    """Around a callable's forward, at its capture: the autocast that it is captured in, and the flag of its weights."""

    def __init__(self, arguments: tuple, flag: WeightFlag | None) -> None:
        self.arguments, self.flag = arguments, flag
        self.used = any(arguments[:2])  # enabled, calibrating
        self.group = arguments[3]
        self.noted: list[Noted] = []  # of the latest forward, in the order in which eager would enter them
        self.plan: Plan | None = None  # of the recipe, where a module was quantized by it
        autocast(*self.arguments, _graph=True)  # what is wrong with a recipe is said here

    @contextmanager
    def __call__(self, parts: list[TransformerEngineBaseModule]) -> Iterator[None]:
        for part in parts:
            part.runtime.quantization.enter_anew()
            for state in _scaling_states(part):
                if state is not None:
                    state.changed()  # a copy of scales that a recomputation needs is made inside the graph, each time
        state = current_state()
        before = state.skip_weight_update, state.noted
        state.skip_weight_update = None if self.flag is None else self.flag.tensor
        noted = state.noted = {}
        try:
            with autocast(*self.arguments, _graph=True):
                own = state.token
                yield
                self.plan = state.plan if state.enabled else None
                known = {id(part) for part in parts}
                found = [(part, *entry) for part, entry in noted.items() if id(part) in known]
                self.noted = [Noted(part, token is not own, group) for part, token, group in found]
        finally:
            state.skip_weight_update, state.noted = before
            for part in parts:
                for state in _scaling_states(part):
                    if state is not None:
                        state.changed()
