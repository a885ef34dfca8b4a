"""Python quantizers for a recipe's or its factory's answer about a tensor. Nothing is quantized here."""

from collections.abc import Callable, Sequence

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization.delayed import Column
from transformer_engine.pytorch.quantization.recipes.products import DELAYED, SCALING_NAMES, Spec, epsilon_of
from transformer_engine.pytorch.quantization.roles import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import SCALINGS, Wanted


def delayed_spec(rule: DelayedScaling, *, forward: bool) -> Spec:
    return (DELAYED, int(not forward and rule.fp8_format.value.max_bwd > 448.0), 0, 0)


def make_quantizer(spec: Spec, device: torch.device, column: Column | None = None) -> Quantizer:
    """The Python quantizer of a spec. column: of delayed scaling; without a column it serves comparisons only."""
    kind, e5m2, pow_2, bits = spec
    dtype = DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3
    wanted = Wanted(SCALING_NAMES[kind], dtype, bool(pow_2), epsilon_of(bits), device, column)
    return SCALINGS[wanted.scaling]._made_for(wanted)


def call_factory(factory: Callable, role: QuantizerRole) -> Quantizer | DelayedScalingRequest | None:
    """A CustomRecipe's answer. Errors: ValueError for a wrong one."""
    answer = factory(role)
    if answer is None or isinstance(answer, (Quantizer, DelayedScalingRequest)):
        return answer
    raise ValueError(
        f"CustomRecipe: argument 'qfactory' returned {answer!r} for {role}, wanted a Quantizer, a "
        "DelayedScalingRequest, or None to leave the tensor in high precision."
    )


def only_rule(rules: Sequence[DelayedScaling]) -> DelayedScaling | None:
    """The one rule that all requests of a module have; None without a request."""
    if any(rule != rules[0] for rule in rules):
        raise NotImplementedError(
            f"CustomRecipe: argument 'qfactory' requests delayed scaling in different ways within one module "
            f"({rules[0]} and others), which is not available in this version; let its requests be equal."
        )
    return rules[0] if rules else None
