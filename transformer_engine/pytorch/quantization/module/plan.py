"""A recipe in one module: the quantizers of its products, and the scales and amax histories of delayed scaling. The
extension quantizes; a region decides when scales change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes
from transformer_engine.pytorch.quantization.delayed import Column, ScalingState
from transformer_engine.pytorch.quantization.recipes.products import (
    BACKWARD_SLOTS,
    DELAYED,
    FORWARD_SLOTS,
    SLOTS,
    Plan,
    native,
)
from transformer_engine.pytorch.quantization.recipes.quantizers import (
    call_factory,
    delayed_spec,
    make_quantizer,
    only_rule,
)
from transformer_engine.pytorch.quantization.roles import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.tensor import Float8Quantizer, Quantizer

ROLES = ("input", "weight", "grad_output")
# How a product under delayed scaling treats its amaxes. RECORD: writes them. QUIET: writes none. RECOMPUTE: a forward
# that is recomputed with the scales of its first run; only the backward after it writes amaxes.
RECORD, QUIET, RECOMPUTE = range(3)


def is_forward(role: str) -> bool:
    return not role.startswith("grad_")


class ModulePlan:
    """shared: the object for every product if nothing has state; otherwise forward, backward: the scaling states."""

    def __init__(
        self,
        plan: Plan,
        roles: Sequence[dict[str, QuantizerRole]],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.roles = roles  # of each product: role -> the question to a factory
        self.device = device
        self.shared = plan.quantization
        self.rule = plan.rule
        self.sources: list[dict[str, object]] = []  # of each product: role -> Spec or Quantizer
        if plan.factory is not None:
            self._call_factory()
        elif plan.specs is not None:
            self.sources = [dict(zip(ROLES, plan.specs, strict=True)) for _ in roles]
        self.forward: ScalingState | None = None
        self.backward: ScalingState | None = None
        self._products: dict[tuple[int, int], object] = {}
        self._all_products: dict[int, list] = {}
        self._weights: dict[tuple[int, int], object] = {}
        # Of weights that exist in FP8 alone: index of the product -> the quantizer that was found to fit.
        self.weights: dict[int, Quantizer] = {}
        self._recompute_scales: torch.Tensor | None = None

    def prepare(self, forward: ScalingState | None, backward: ScalingState | None) -> None:
        """Continues with the present states, or makes new ones."""
        if self.rule is None:
            return
        for name, state, slots in (("forward", forward, FORWARD_SLOTS), ("backward", backward, BACKWARD_SLOTS)):
            columns = slots * len(self.roles)
            if state is None or state.scale.numel() != columns:
                state = ScalingState(self.rule, columns, self.device, forward=name == "forward")
            else:
                state.adopt(self.rule)
                if state.scale.device != self.device:
                    state.move(self.device)
            setattr(self, name, state)
        with torch.inference_mode(False):  # a tensor from inside could not be written outside
            self._recompute_scales = torch.empty_like(self.forward.scale)

    # ---- answers of a factory ----

    def _call_factory(self) -> None:
        rules: list[DelayedScaling] = []
        self.sources = [{role: self._answer(requested[role], rules) for role in ROLES} for requested in self.roles]
        self.rule = only_rule(rules)
        if self.rule is not None and not self.plan.reads_columns:
            raise ValueError(
                f"CustomRecipe: argument 'backward_override' is {self.plan.recipe.backward_override!r}, but 'qfactory' "
                "requests delayed scaling, which has none; pass None, also with NVTE_BACKWARD_OVERRIDE set, or let the "
                "factory return quantizers."
            )
        self.shared = None

    def _answer(self, role: QuantizerRole, rules: list[DelayedScaling]) -> object:
        answer = call_factory(self.plan.factory, role)
        if not isinstance(answer, DelayedScalingRequest):
            return answer
        rule = answer.recipe()
        rules.append(rule)
        return delayed_spec(rule, forward=is_forward(role.tensor_type))

    # ---- the extension's objects, made once ----

    def _native(self, index: int, role: str, variant: int) -> object:
        source = self.sources[index][role]
        if source is None:
            return native((0, 0, 0, 0))
        if isinstance(source, Quantizer):
            return source._native()
        if source[0] != DELAYED:
            return native(source)
        forward = is_forward(role)
        state = self.forward if forward else self.backward
        column = (FORWARD_SLOTS if forward else BACKWARD_SLOTS) * index + SLOTS[role]
        scales = self._recompute_scales if forward and variant == RECOMPUTE else state.scale
        quiet = variant == QUIET or (forward and variant == RECOMPUTE)
        with outside_of_modes():
            return native(source, scales[column : column + 1], None if quiet else state.amax_of(column))

    def product(self, index: int, variant: int) -> object:
        """_C.ProductQuantization of a product."""
        found = self._products.get((index, variant))
        if found is None:
            quantizers = {role: self._native(index, role, variant) for role in ROLES}
            found = _C.ProductQuantization(*quantizers.values(), *self.plan.splits, self.plan.backward)
            self._products[index, variant] = found
        return found

    def products(self, variant: int) -> list:
        """product() of all products, in a list that stays this plan's."""
        found = self._all_products.get(variant)
        if found is None:
            found = self._all_products[variant] = [self.product(i, variant) for i in range(len(self.roles))]
        return found

    def weight_quantizer(self, index: int, variant: int) -> object:
        """_C.Quantizer of a product's weight."""
        found = self._weights.get((index, variant))
        if found is None:
            found = self._weights[index, variant] = self._native(index, "weight", variant)
        return found

    def use_recompute_scales(self, scales: torch.Tensor) -> None:
        """Sets the forward scales of RECOMPUTE products."""
        self._recompute_scales.copy_(scales)

    def note(self, index: int, role: str, amax: torch.Tensor) -> None:
        """Records an amax, float32 [1], of a tensor that is read in high precision."""
        column = FORWARD_SLOTS * index + SLOTS[role]
        newest = self.forward.amax_of(column)
        torch.maximum(newest, amax, out=newest)

    def drop_views(self) -> None:
        """The histories have been replaced by other tensors."""
        self._products.clear()
        self._all_products.clear()
        self._weights.clear()

    # ---- the same quantizers as Python objects ----

    def python_quantizers(self) -> dict[str, list[Quantizer | None]]:
        """The quantizers of input, weight, output and of grad_output, grad_input of each product, for clients."""
        found: dict[str, list[Quantizer | None]] = {"scaling_fwd": [], "scaling_bwd": []}
        for index in range(len(self.roles)):
            for role in SLOTS:
                key = "scaling_fwd" if is_forward(role) else "scaling_bwd"
                found[key].append(self.python_quantizer(index, role))
        return found

    def python_quantizer(self, index: int, role: str, *, held: bool = False) -> Quantizer | None:
        """held: of a weight that exists in FP8 alone."""
        source = self._source(index, role)
        if source is None or isinstance(source, Quantizer):
            return source
        forward = is_forward(role)
        state = self.forward if forward else self.backward
        column = (FORWARD_SLOTS if forward else BACKWARD_SLOTS) * index + SLOTS[role]
        return make_quantizer(source, self.device, Column(state, column, held) if source[0] == DELAYED else None)

    def output_quantizer(self, variant: int) -> Quantizer | None:
        """The quantizer of the first product's output, for one call."""
        found = self.python_quantizer(0, "output")
        if variant == RECORD or getattr(found, "_column", None) is None:  # or without state of the module
            return found
        column = SLOTS["output"]  # a scale of its own, and an amax that is never read
        scale = (self._recompute_scales if variant == RECOMPUTE else self.forward.scale)[column : column + 1].clone()
        return Float8Quantizer(scale, torch.zeros_like(scale), found.dtype)

    def weight_format(self, index: int) -> Quantizer | None:
        """A quantizer of a product's weight without state, for comparisons."""
        source = self.sources[index]["weight"]
        return source if source is None or isinstance(source, Quantizer) else make_quantizer(source, self.device)

    def _source(self, index: int, role: str) -> object:
        if role in self.sources[index]:
            return self.sources[index][role]
        if self.plan.factory is None:  # an output is quantized like an input, the input's gradient like the output's
            return self.sources[index]["input" if role == "output" else "grad_output"]
        rules: list[DelayedScaling] = []
        source = self._answer(self.roles[index][role], rules)
        if any(rule != self.rule for rule in rules):
            raise NotImplementedError(
                f"CustomRecipe: argument 'qfactory' requests delayed scaling of '{role}' in another way than of the "
                "module's other tensors, which is not available in this version; let its requests be equal."
            )
        self.sources[index][role] = source
        return source
