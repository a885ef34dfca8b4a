"""RecipeState: the quantizers of one direction of a module under a recipe, for clients that quantize themselves.
Modules have their own, in module/plan.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch._internal.arguments import check_size
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization.delayed import Column, ScalingState
from transformer_engine.pytorch.quantization.recipes.formats import get_fp8_te_dtype, must_be_a_recipe
from transformer_engine.pytorch.quantization.recipes.products import by_engine, plan_of
from transformer_engine.pytorch.quantization.recipes.quantizers import (
    call_factory,
    delayed_spec,
    make_quantizer,
    only_rule,
)
from transformer_engine.pytorch.quantization.roles import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.tensor import Quantizer
from transformer_engine.pytorch.utils import resolve_device

# The roles of the tensors of a direction, repeated for each product.
_ROLES = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
# Their specs in a plan: an output is quantized like an input, the input's gradient like the output's.
_SPECS = {"forward": (0, 1, 0), "backward": (2, 2)}


class RecipeState(ABC):
    """recipe; mode: 'forward' for input, weight and output of each product in turn, 'backward' for the gradients of its
    output and its input; num_quantizers; dtype: the element type of that direction; device: by default CUDA if there is
    one."""

    _kind: ClassVar[str]  # the method of a recipe that returns True for this class

    def __init__(
        self, recipe: Recipe, *, mode: str, num_quantizers: int = 1, device: torch.device | str | None = None
    ) -> None:
        op = type(self).__name__
        must_be_a_recipe(op, recipe)
        if not self._serves(recipe):
            raise ValueError(
                f"{op}: argument 'recipe' is a {type(recipe).__name__}; RecipeState.create picks its class."
            )
        if mode not in _ROLES:
            raise ValueError(f"{op}: argument 'mode' is {mode!r}, wanted 'forward' or 'backward'.")
        check_size(op, "num_quantizers", num_quantizers)
        self.recipe = recipe
        self.plan = plan_of(recipe)  # raises for a recipe that is not supported
        self.mode = mode
        self.num_quantizers = int(num_quantizers)
        self.device = resolve_device(device)

    @classmethod
    def _serves(cls, recipe: Recipe) -> bool:
        return getattr(recipe, cls._kind)()

    @staticmethod
    def create(
        recipe: Recipe, *, mode: str, num_quantizers: int = 1, device: torch.device | str | None = None
    ) -> RecipeState:
        """The state for the recipe's class. Errors: ValueError for a wrong recipe, mode or size; NotImplementedError
        for a recipe that is not supported."""
        op = "RecipeState.create"
        must_be_a_recipe(op, recipe)
        if recipe.mxfp8() or recipe.nvfp4():
            plan_of(recipe)  # raises with the reason
        kind = next((kind for kind in _KINDS if kind._serves(recipe)), None)
        if kind is None:
            raise ValueError(
                f"{op}: argument 'recipe' is a {type(recipe).__name__}, wanted one of the recipes' classes."
            )
        return kind(recipe, mode=mode, num_quantizers=num_quantizers, device=device)

    @abstractmethod
    def make_quantizers(self) -> list[Quantizer | None]:
        """num_quantizers of them, with both directions of data."""

    @property
    def dtype(self) -> DType:
        return get_fp8_te_dtype(self.recipe, self.mode == "forward")


class DelayedScalingRecipeState(RecipeState, ScalingState):
    """scale [n], amax_history [length, n]: each quantizer reads a scale and writes amaxes into row 0 of its column.
    They change like a module's if FP8GlobalStateManager.add_fp8_tensors_to_global_buffer adds them to an autocast."""

    _kind = "delayed"

    def __init__(
        self, recipe: DelayedScaling, *, mode: str, num_quantizers: int = 1, device: torch.device | str | None = None
    ) -> None:
        RecipeState.__init__(self, recipe, mode=mode, num_quantizers=num_quantizers, device=device)
        ScalingState.__init__(self, recipe, self.num_quantizers, self.device, forward=mode == "forward")

    def make_quantizers(self) -> list[Quantizer | None]:
        return [_delayed(self, column) for column in range(self.num_quantizers)]


def _delayed(state: ScalingState, column: int) -> Quantizer:
    spec = delayed_spec(state.rule, forward=state.forward)
    return make_quantizer(spec, state.scale.device, Column(state, column))


class _Stateless(RecipeState):
    def make_quantizers(self) -> list[Quantizer | None]:
        slots = _SPECS[self.mode]
        specs = [self.plan.specs[slots[i % len(slots)]] for i in range(self.num_quantizers)]
        return [make_quantizer(spec, self.device) for spec in specs]


class Float8CurrentScalingRecipeState(_Stateless):
    """Keeps no state between steps."""

    _kind = "float8_current_scaling"


class Float8BlockScalingRecipeState(_Stateless):
    """Keeps no state between steps."""

    _kind = "float8_block_scaling"


class CustomRecipeState(RecipeState):
    """The recipe's factory is called for each tensor of a linear layer without a name; None means high precision. If it
    requests delayed scaling, `scaling` keeps the scales and histories of all tensors."""

    _kind = "custom"
    scaling: ScalingState | None = None

    def make_quantizers(self) -> list[Quantizer | None]:
        roles = _ROLES[self.mode]
        requested = [QuantizerRole("linear", roles[i % len(roles)]) for i in range(self.num_quantizers)]
        answers = [call_factory(self.plan.factory, role) for role in requested]
        rule = only_rule([answer.recipe() for answer in answers if isinstance(answer, DelayedScalingRequest)])
        if rule is not None and self.scaling is None:
            self.scaling = ScalingState(rule, self.num_quantizers, self.device, forward=self.mode == "forward")
        return [
            _delayed(self.scaling, column) if isinstance(answer, DelayedScalingRequest) else answer
            for column, answer in enumerate(answers)
        ]


class _FormatsRecipeState(CustomRecipeState):
    """For a recipe that names formats which are quantized in Python: these answer like a factory."""

    @classmethod
    def _serves(cls, recipe: Recipe) -> bool:
        return not by_engine(recipe)


_KINDS = (
    DelayedScalingRecipeState,
    Float8CurrentScalingRecipeState,
    Float8BlockScalingRecipeState,
    CustomRecipeState,
    _FormatsRecipeState,
)
