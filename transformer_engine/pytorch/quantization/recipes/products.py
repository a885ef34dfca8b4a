"""How a recipe quantizes a product: the specs of its input, its weight and its output's gradient; recipes that are not
supported are refused with the reason. It turns recipes into plain integers and quantizers."""

from __future__ import annotations

import copy
import operator
import os
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Format, QParams, Recipe
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization.roles import QuantizerRole
from transformer_engine.pytorch.tensor.engine import STATELESS
from transformer_engine.pytorch.tensor.registry import SCALINGS, Wanted

# QuantizeSpec::Kind of csrc/quantize/quantize.h; a spec is (kind, e5m2, pow_2_scales, the bits of amax_epsilon).
SCALING_NAMES = tuple(name for name, *_ in _C.quantizer_kinds)
NONE, DELAYED = map(SCALING_NAMES.index, ("none", "delayed"))
_BY_ENGINE = {"none": NONE, **STATELESS}
Spec = Sequence[int]

_BACKWARD = {None: 0, "high_precision": 1, "dequantized": 2}  # BackwardReads of csrc/gemm/product.h
DELAYED_SPLITS = (False, True, True)  # use_split_accumulator: not in the forward product, in both backward products
SLOTS = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}  # of a product, each way
FORWARD_SLOTS, BACKWARD_SLOTS = 3, 2
# Of Recipe._scalings: an output is quantized like an input, its gradient and the input's gradient like the output's.
_SCALED_AS = {"input": 0, "weight": 1, "output": 0, "grad_output": 2, "grad_input": 2}


def _no(op: str, what: str, advice: str) -> None:
    refuse(f"{op}: {what}; {advice}.")


def check_recipe(recipe: object) -> None:
    """Raises for a recipe that this library does not support. Traceable."""
    op = type(recipe).__name__
    if not isinstance(recipe, Recipe):
        raise ValueError(f"autocast: argument 'recipe' is a {op}, wanted a recipe of transformer_engine.common.recipe.")
    if recipe.mxfp8() or recipe.nvfp4():
        _no(
            op,
            "products that need a Blackwell GPU (compute capability 10.0) are not available in this version",
            "use Float8BlockScaling, Float8CurrentScaling or DelayedScaling",
        )
    if recipe.fp8_dpa or recipe.fp8_mha:
        name = "fp8_dpa" if recipe.fp8_dpa else "fp8_mha"
        _no(op, f"argument '{name}' is True, but FP8 attention is not available in this version", "leave it at False")
    if recipe.fp8_format is Format.E5M2 or recipe.fp8_format is Format.E2M1:
        _no(
            op,
            f"argument 'fp8_format' is {recipe.fp8_format.name}, but products of two such operands are not available "
            "in this version",
            "use HYBRID or E4M3",
        )


def _spec(op: str, kind: int, params: QParams, e5m2: bool) -> list[int]:
    if params.random_hadamard_transform or params.stochastic_rounding or params.fp4_2d_quantization:
        _no(
            op,
            "QParams requests a Hadamard transform, stochastic rounding or FP4, not available in this version",
            "leave them at False",
        )
    return [kind, int(e5m2), int(params.power_2_scale), params.amax_epsilon_bits]


def stateless_integers(recipe: Recipe) -> list[int]:
    """_C.ProductQuantization.spec of a recipe whose quantizers keep no state between steps. Traceable."""
    check_recipe(recipe)
    op = type(recipe).__name__
    e5m2 = recipe.fp8_format is Format.HYBRID
    scalings = recipe._scalings()
    for name in scalings:
        if name not in _BY_ENGINE:
            _no(
                op,
                f"its '{name}' is quantized in Python, which is not available in this version under torch.compile, and "
                "for functions that have no module",
                "keep modules out of the compiled region",
            )
    kinds = [_BY_ENGINE[name] for name in scalings]
    splits = [recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad]
    if recipe.float8_block_scaling():
        dims = (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim)
        if sum(dims) > 4:
            _no(
                op,
                f"(x, w, grad)_block_scaling_dim are {dims}, but a product of two operands in 128 x 128 blocks is not "
                "available in this version",
                "let at most one of them be 2",
            )
        for name, split in (("fprop", splits[0]), ("dgrad", splits[1]), ("wgrad", splits[2])):
            if not split.use_split_accumulator:
                raise ValueError(
                    f"{op}: argument 'fp8_gemm_{name}' has use_split_accumulator False, which products of blocks "
                    "cannot honour; leave it at True."
                )
    return [
        *_spec(op, kinds[0], recipe.fp8_quant_fwd_inp, False),
        *_spec(op, kinds[1], recipe.fp8_quant_fwd_weight, False),
        *_spec(op, kinds[2], recipe.fp8_quant_bwd_grad, e5m2),
        int(splits[0].use_split_accumulator),
        int(splits[1].use_split_accumulator),
        int(splits[2].use_split_accumulator),
        _BACKWARD[recipe.backward_override],
    ]


def traced_integers(recipe: Recipe) -> list[int]:
    """stateless_integers under torch.compile, where state between steps is refused by name."""
    if recipe.delayed() or recipe.custom():
        refuse(
            f"{type(recipe).__name__}: its scales are state that torch.compile cannot follow, which is not available "
            "in this version; use Float8CurrentScaling or Float8BlockScaling, or keep the module out of the compiled "
            "region."
        )
    return stateless_integers(recipe)


def by_engine(recipe: Recipe) -> bool:
    """Whether the engine can scale every tensor; quantizers in Python do it otherwise."""
    return recipe.delayed() or all(scaling in _BY_ENGINE for scaling in recipe._scalings())


def _quantizer_of_format(recipe: Recipe, role: QuantizerRole) -> object:
    """A factory's answer for a recipe that names its formats: the quantizer that the format registered."""
    forward = not role.tensor_type.startswith("grad_")
    scaling = recipe._scalings()[_SCALED_AS[role.tensor_type]]
    if scaling == "none":
        return None
    if scaling == "delayed" or scaling not in SCALINGS:
        known = sorted({*_BY_ENGINE, *SCALINGS} - {"delayed"})
        raise ValueError(f"{type(recipe).__name__}: it has a tensor scaled by {scaling!r}, wanted one of {known}.")
    e5m2 = recipe.fp8_format.value.max_fwd > 448.0 if forward else recipe.fp8_format.value.max_bwd > 448.0
    fp8_dtype = DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3
    return SCALINGS[scaling]._made_for(Wanted(scaling, fp8_dtype, recipe=recipe))


def epsilon_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<i", bits))[0]


def native(spec: Spec, scale: torch.Tensor | None = None, amax: torch.Tensor | None = None) -> object:
    """The extension's quantizer of a spec."""
    kind, e5m2, pow_2, bits = spec
    return _C.Quantizer(SCALING_NAMES[kind], bool(e5m2), bool(pow_2), epsilon_of(bits), scale, amax)


@dataclass(frozen=True, eq=False)
class Plan:
    """The quantizers of a recipe. Recipes of equal values share one plan, so that plans are compared by identity.

    rule: the delayed scaling in it, or None. specs: of input, weight, grad_output if there is no factory.
    quantization: the one object for every product, if quantizers have no state and no factory makes them.
    """

    recipe: Recipe
    rule: DelayedScaling | None = None
    specs: tuple[Spec, Spec, Spec] | None = None
    splits: tuple[bool, bool, bool] = DELAYED_SPLITS
    quantization: object | None = None
    factory: Callable | None = None

    @property
    def backward(self) -> int:
        """The operands of the backward's products: BackwardReads of csrc/gemm/product.h."""
        return _BACKWARD[self.recipe.backward_override]

    @property
    def reads_columns(self) -> bool:
        """Whether a backward reads FP8 operands columnwise."""
        return self.recipe.backward_override is None


_plans: dict[object, Plan] = {}
_making = threading.Lock()
_MOST_PLANS = 256  # a limit for clients that make recipes of other values in each step


_values_of: dict[type, Callable] = {}  # a recipe's fields


def _new_values_of(kind: type) -> Callable:
    names = tuple(getattr(kind, "__dataclass_fields__", ()))
    found = _values_of[kind] = operator.attrgetter(*names) if names else lambda _: None
    return found


def plan_of(recipe: Recipe) -> Plan:
    """The plan of a recipe with its present fields. Errors: as check_recipe, before anything is kept."""
    kind = type(recipe)
    key = kind, (_values_of.get(kind) or _new_values_of(kind))(recipe)
    plan = _plans.get(key)
    if plan is None:
        plan = _new_plan(copy.copy(recipe))  # the owner may change its fields later
        with _making:
            if len(_plans) >= _MOST_PLANS:
                del _plans[next(iter(_plans))]
            plan = _plans.setdefault(key, plan)  # another thread may have made it in between
    return plan


def _new_plan(recipe: Recipe) -> Plan:
    check_recipe(recipe)
    if isinstance(recipe, CustomRecipe):
        return Plan(recipe, factory=recipe.qfactory)
    if isinstance(recipe, DelayedScaling):
        if override := os.environ.get("NVTE_BACKWARD_OVERRIDE"):
            warnings.warn(
                f"DelayedScaling: the environment's NVTE_BACKWARD_OVERRIDE is {override!r}, which this recipe does not "
                "have: its backward reads FP8 operands. Float8CurrentScaling and Float8BlockScaling follow it.",
                stacklevel=2,
            )
        e5m2 = int(recipe.fp8_format is Format.HYBRID)
        return Plan(recipe, rule=recipe, specs=((DELAYED, 0, 0, 0), (DELAYED, 0, 0, 0), (DELAYED, e5m2, 0, 0)))
    if not by_engine(recipe):
        return Plan(recipe, factory=partial(_quantizer_of_format, recipe))
    flat = stateless_integers(recipe)
    specs, splits = (flat[0:4], flat[4:8], flat[8:12]), tuple(bool(flag) for flag in flat[12:15])
    quantization = _C.ProductQuantization(*(native(spec) for spec in specs), *splits, flat[15])
    return Plan(recipe, None, specs, splits, quantization)
