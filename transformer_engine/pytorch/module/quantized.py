"""A recipe in one module: the quantizers of its products, and the scales and amax histories of delayed scaling. How a
format quantizes is the extension's business, when scales change is the region's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization.delayed import ScalingState
from transformer_engine.pytorch.quantization.products import (
    BACKWARD_SLOTS,
    BLOCK_2D,
    CURRENT,
    DELAYED,
    FORWARD_SLOTS,
    SLOTS,
    Plan,
    Spec,
    epsilon_of,
    native,
)
from transformer_engine.pytorch.quantization.roles import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)

ROLES = ("input", "weight", "grad_output")
# Of a delayed product. RECORD: notes amaxes. QUIET: notes none. AGAIN: a recomputation, by the scales of the first run;
# it notes those of the backward behind it alone.
RECORD, QUIET, AGAIN = range(3)


def is_forward(role: str) -> bool:
    return not role.startswith("grad_")


class ModuleQuantization:
    """shared: what every product takes, where nothing here has state. Else forward, backward: the scaling states."""

    def __init__(
        self,
        plan: Plan,
        roles: Sequence[dict[str, QuantizerRole]],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.roles = roles  # of each product: role -> what a factory is asked
        self.device = device
        self.shared = plan.quantization
        self.rule = plan.rule
        self.sources: list[dict[str, object]] = []  # of each product: role -> Spec or Quantizer
        if plan.factory is not None:
            self._ask_factory()
        elif plan.specs is not None:
            self.sources = [dict(zip(ROLES, plan.specs, strict=True)) for _ in roles]
        self.forward: ScalingState | None = None
        self.backward: ScalingState | None = None
        self._products: dict[tuple[int, int], object] = {}
        self._weights: dict[tuple[int, int], object] = {}
        self._again: torch.Tensor | None = None

    def prepare(self, forward: ScalingState | None, backward: ScalingState | None) -> None:
        """Goes on with the states that there are, or makes new ones."""
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
        self._again = torch.empty_like(self.forward.scale)

    # ---- what a factory answers ----

    def _ask_factory(self) -> None:
        rules: list[DelayedScaling] = []
        self.sources = [{role: self._answer(asked[role], rules) for role in ROLES} for asked in self.roles]
        if rules:
            if any(rule != rules[0] for rule in rules):
                raise NotImplementedError(
                    f"CustomRecipe: argument 'qfactory' asks for delayed scaling in different ways within one module "
                    f"({rules[0]} and others), which is not available in this version; let its requests be equal."
                )
            self.rule = rules[0]
        self.shared = None

    def _answer(self, role: QuantizerRole, rules: list[DelayedScaling]) -> object:
        answer = self.plan.factory(role)
        if isinstance(answer, DelayedScalingRequest):
            rule = answer.recipe()
            rules.append(rule)
            return delayed_spec(rule, forward=is_forward(role.tensor_type))
        if answer is None or isinstance(answer, Quantizer):
            return answer
        raise ValueError(
            f"CustomRecipe: argument 'qfactory' returned {answer!r} for {role}, wanted a Quantizer, a "
            "DelayedScalingRequest, or None to leave the tensor in high precision."
        )

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
        scales = self._again if forward and variant == AGAIN else state.scale
        quiet = variant == QUIET or (forward and variant == AGAIN)
        return native(source, scales[column : column + 1], None if quiet else state.amax_of(column))

    def product(self, index: int, variant: int) -> object:
        """_C.ProductQuantization of a product."""
        found = self._products.get((index, variant))
        if found is None:
            made = {role: self._native(index, role, variant) for role in ROLES}
            found = _C.ProductQuantization(*made.values(), *self.plan.splits)
            self._products[index, variant] = found
        return found

    def weight_quantizer(self, index: int, variant: int) -> object:
        """_C.Quantizer of a product's weight."""
        found = self._weights.get((index, variant))
        if found is None:
            found = self._weights[index, variant] = self._native(index, "weight", variant)
        return found

    def use_again(self, scales: torch.Tensor) -> None:
        """The forward scales of the AGAIN products."""
        self._again.copy_(scales)

    def note(self, index: int, role: str, amax: torch.Tensor) -> None:
        """An amax, float32 [1], of a tensor that is computed with in high precision."""
        column = FORWARD_SLOTS * index + SLOTS[role]
        newest = self.forward.amax_of(column)
        torch.maximum(newest, amax, out=newest)

    @torch.no_grad()
    def start_at(self, index: int, role: str, value: torch.Tensor) -> None:
        """A delayed scale that is made from the value itself: there is no earlier step to make it from."""
        if self.forward is not None and self.sources[index][role][0] == DELAYED:
            amax = _C.quantize_amax(value.detach())
            scale = self.forward.scale_of(FORWARD_SLOTS * index + SLOTS[role])
            scale.copy_(torch.where((amax > 0) & amax.isfinite(), self.forward.fp8_max / amax, scale))

    def drop_views(self) -> None:
        """The histories are other tensors now."""
        self._products.clear()
        self._weights.clear()

    # ---- the same quantizers as Python's objects ----

    def python_quantizers(self) -> dict[str, list[Quantizer | None]]:
        """Those of input, weight, output and of grad_output, grad_input of each product, as clients look at them."""
        found: dict[str, list[Quantizer | None]] = {"scaling_fwd": [], "scaling_bwd": []}
        for index in range(len(self.roles)):
            for role in SLOTS:
                key = "scaling_fwd" if is_forward(role) else "scaling_bwd"
                found[key].append(self.python_quantizer(index, role))
        return found

    def python_quantizer(self, index: int, role: str) -> Quantizer | None:
        source = self._source(index, role)
        if source is None or isinstance(source, Quantizer):
            return source
        forward = is_forward(role)
        state = self.forward if forward else self.backward
        column = (FORWARD_SLOTS if forward else BACKWARD_SLOTS) * index + SLOTS[role]
        delayed = source[0] == DELAYED
        return make_quantizer(
            source, self.device, state.scale_of(column) if delayed else None, state.amax_of(column) if delayed else None
        )

    def _source(self, index: int, role: str) -> object:
        if role in self.sources[index]:
            return self.sources[index][role]
        if self.plan.factory is None:  # an output is quantized as an input, its gradient as the output's
            return self.sources[index]["input" if role == "output" else "grad_output"]
        rules: list[DelayedScaling] = []
        source = self._answer(self.roles[index][role], rules)
        if any(rule != self.rule for rule in rules):
            raise NotImplementedError(
                f"CustomRecipe: argument 'qfactory' asks for delayed scaling of '{role}' in another way than of the "
                "module's other tensors, which is not available in this version; let its requests be equal."
            )
        self.sources[index][role] = source
        return source


def delayed_spec(rule: DelayedScaling, *, forward: bool) -> Spec:
    return (DELAYED, int(not forward and rule.fp8_format.value.max_bwd > 448.0), 0, 0)


def make_quantizer(
    spec: Spec, device: torch.device, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> Quantizer:
    """Python's quantizer of a spec; scale and amax where it is delayed."""
    kind, e5m2, pow_2, bits = spec
    dtype = DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3
    options = {"amax_epsilon": epsilon_of(bits)}
    if kind == DELAYED:
        return Float8Quantizer(scale, amax, dtype)
    if kind == CURRENT:
        return Float8CurrentScalingQuantizer(dtype, device, force_pow_2_scales=bool(pow_2), **options)
    return Float8BlockQuantizer(
        dtype,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=bool(pow_2),
        block_scaling_dim=2 if kind == BLOCK_2D else 1,
        **options,
    )
