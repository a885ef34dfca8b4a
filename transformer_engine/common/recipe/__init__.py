"""Recipes: which tensors are quantized, to which format and with which scales. Plain data with checks; nothing is
quantized here, and a recipe can be made on any machine."""

import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar, NamedTuple

_LARGEST = (2 - 2.0**-23) * 2.0**127  # float32's


class FormatRange(NamedTuple):
    """The largest finite values of a format's forward and backward types."""

    max_fwd: float
    max_bwd: float


_FormatHelper = FormatRange  # by the name that clients import


class Format(Enum):
    """E4M3 and E5M2 for everything; HYBRID: E4M3 forward, E5M2 for gradients; E2M1: four bits."""

    E2M1 = FormatRange(6.0, 6.0)
    E4M3 = FormatRange(448.0, 448.0)
    E5M2 = FormatRange(57344.0, 57344.0)
    HYBRID = FormatRange(448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    """How a product is computed. use_split_accumulator: with float32 accumulation throughout."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        _a_bool("MMParams", "use_split_accumulator", self.use_split_accumulator)


@dataclass(frozen=True)
class QParams:
    """How a tensor is quantized. power_2_scale: scales are rounded down to powers of two. amax_epsilon: the least amax
    for a scale. The others belong to NVFP4, and raise when a tensor is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "amax_epsilon":
                _a_bool("QParams", item.name, getattr(self, item.name))
        epsilon = self.amax_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= _LARGEST:
            _fail("QParams", "amax_epsilon", epsilon, "a number, at least 0, that is a float32")
        # An integer, which torch.compile treats as a constant: the bits of the float32.
        object.__setattr__(self, "amax_epsilon_bits", struct.unpack("<i", struct.pack("<f", epsilon))[0])


# ---- checks: (recipe, argument, value) -> the value to keep ----


def _fail(op: str, name: str, value: object, wanted: str) -> None:
    raise ValueError(f"{op}: argument '{name}' is {value!r}, wanted {wanted}.")


def _a_bool(op: str, name: str, value: object) -> bool:
    return value if isinstance(value, bool) else _fail(op, name, value, "True or False")


def _integer(least: int, most: int | None = None) -> Callable:
    wanted = f"a whole number, at least {least}" + ("" if most is None else f" and at most {most}")

    def check(op: str, name: str, value: object) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
            _fail(op, name, value, wanted)
        return int(value) if most is None or int(value) <= most else _fail(op, name, value, wanted)

    return check


_A_MARGIN = _integer(0, 127)  # 2**margin is a float32


def _one_of(*choices: object) -> Callable:
    def check(op: str, name: str, value: object) -> object:
        return value if value in choices else _fail(op, name, value, f"one of {list(choices)}")

    return check


def _called(*others: object) -> Callable:
    """A function, or one of `others`."""

    def check(op: str, name: str, value: object) -> object:
        if callable(value) or any(value is other or value == other for other in others):
            return value
        return _fail(op, name, value, " or ".join(["a function", *map(repr, others)]))

    return check


def _a_format(op: str, name: str, value: object) -> Format:
    """A Format, or the name of one."""
    if isinstance(value, str) and value in Format.__members__:
        return Format[value]
    return value if isinstance(value, Format) else _fail(op, name, value, f"one of {list(Format.__members__)}")


def _a(kind: type) -> Callable:
    def check(op: str, name: str, value: object) -> object:
        return value if isinstance(value, kind) else _fail(op, name, value, f"a {kind.__name__}")

    return check


def _field(default: object, check: Callable):
    return field(default=default, metadata={"check": check})


# Default functions belong to the module: torch.compile needs a constant, or a name by which it finds the object again.
def _as_it_is() -> QParams:
    return _AS_IT_IS


def _split() -> MMParams:
    return _SPLIT


def _fast() -> MMParams:
    return _FAST


def _params(default: Callable):
    return field(default_factory=default, metadata={"check": _a(type(default()))})


def _flag(default: bool = False):
    return _field(default, _a_bool)


_AS_IT_IS, _POWERS_OF_2 = QParams(), QParams(power_2_scale=True)
_SPLIT, _FAST = MMParams(), MMParams(use_split_accumulator=False)


class Recipe:
    """The methods of every recipe. Recipes compare by value and ignore unknown arguments. A field is checked whenever
    it is set. Values are saturated in FP8: Inf becomes the largest finite value at its scale, NaN stays NaN."""

    _alignment: ClassVar[int] = 16  # the rows of a product's operand must be a multiple of it

    def _scalings(self) -> tuple[str, ...]:
        """How input, weight and output's gradient are scaled, by the names that quantizers register. For a client's own
        class they are scaled as by Float8CurrentScaling."""
        return ("current",) * 3

    def __setattr__(self, name: str, value: object) -> None:
        item = self.__dataclass_fields__.get(name)
        check = None if item is None else item.metadata.get("check")
        object.__setattr__(self, name, value if check is None else check(type(self).__name__, name, value))

    def __repr__(self) -> str:
        values = [f"recipe_type={type(self).__name__}"]
        for item in fields(self):
            value = getattr(self, item.name)
            shown = value.name if isinstance(value, Format) else repr(value)
            values.append(f"{item.name}={shown}")
        return ", ".join(values)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


def _recipe(cls: type) -> type:
    """A dataclass whose __init__ ignores unknown keywords: clients pass those of other versions."""
    cls = dataclass(repr=False)(cls)
    known, init = {item.name for item in fields(cls)}, cls.__init__

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **{name: value for name, value in kwargs.items() if name in known})

    cls.__init__ = __init__
    return cls


_OVERRIDES = (None, "high_precision", "dequantized")


def _environments_override() -> str | None:
    word = os.environ.get("NVTE_BACKWARD_OVERRIDE") or None
    if word not in _OVERRIDES:
        raise ValueError(
            f"recipe: the environment's NVTE_BACKWARD_OVERRIDE is {word!r}, the default of argument "
            "'backward_override', wanted 'high_precision' or 'dequantized', or that it is not set."
        )
    return word


def _override():
    """The operands of a backward's products, besides a gradient that is not quantized: unquantized, or the dequantized
    operands of the forward. None: the operands quantized, as the forward's."""
    return field(default_factory=_environments_override, metadata={"check": _one_of(*_OVERRIDES)})


@_recipe
class DelayedScaling(Recipe):
    """Per-tensor scales from the amax history of earlier steps: scale = (largest of format / amax) / 2**margin.
    Saturates: Inf becomes the largest finite value at the scale of earlier steps, and makes no scale; NaN stays NaN.

    margin: a whole number. fp8_format: E4M3, or HYBRID, whose gradients are E5M2. amax_history_len: the number of steps
    whose amaxes are kept. amax_compute_algo: "max" of them, "most_recent", or a function (history) -> amaxes, history
    being float32 [amax_history_len, tensors]. scaling_factor_compute_algo: a function (amaxes, scales, largest of
    format, recipe) -> scales in place of the formula. reduce_amax: amaxes are the largest over the ranks of autocast's
    amax_reduction_group. fp8_dpa, fp8_mha: FP8 attention, which autocast refuses. backward_override: None alone.
    Errors: ValueError or TypeError naming the field.
    """

    margin: int = _field(0, _A_MARGIN)
    fp8_format: Format = _field(Format.HYBRID, _a_format)
    amax_history_len: int = _field(1024, _integer(1))
    amax_compute_algo: str | Callable = _field("max", _called("max", "most_recent"))
    scaling_factor_compute_algo: Callable | None = _field(None, _called(None))
    reduce_amax: bool = _flag(True)
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    backward_override: None = _field(None, _one_of(None))

    def _scalings(self) -> tuple[str, ...]:
        return ("delayed",) * 3


@_recipe
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself; 1 where its amax is 0 or infinite. Saturates: Inf becomes the largest
    finite value, 448 in E4M3 and 57344 in E5M2; NaN stays NaN.

    fp8_format: E4M3, or HYBRID, whose gradients are E5M2. fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad:
    how inputs, weights and gradients are quantized. fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: how the three
    products accumulate. fp8_dpa, fp8_mha: FP8 attention, which autocast refuses. backward_override: None, or the
    operands of the backward's products: "high_precision", the original ones, or "dequantized", the forward's
    dequantized ones; default NVTE_BACKWARD_OVERRIDE. Errors: ValueError or TypeError naming the field.
    """

    fp8_format: Format = _field(Format.HYBRID, _a_format)
    fp8_quant_fwd_inp: QParams = _params(_as_it_is)
    fp8_quant_fwd_weight: QParams = _params(_as_it_is)
    fp8_quant_bwd_grad: QParams = _params(_as_it_is)
    fp8_gemm_fprop: MMParams = _params(_fast)
    fp8_gemm_dgrad: MMParams = _params(_split)
    fp8_gemm_wgrad: MMParams = _params(_split)
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    backward_override: str | None = _override()


def _block_quantization():
    """Scales are powers of two unless the environment allows any float32."""
    pow_2 = os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1"
    return _POWERS_OF_2 if pow_2 else _AS_IT_IS


@_recipe
class Float8BlockScaling(Recipe):
    """A scale for each 1 x 128 (dim 1) or 128 x 128 (dim 2) block; 1 where its amax is 0 or infinite. Saturates: Inf
    becomes the largest finite value, 448 in E4M3 and 57344 in E5M2; NaN stays NaN.

    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 or 2, of inputs, weights and gradients. Scales
    are powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1. The other fields are as in Float8CurrentScaling.
    Errors: ValueError or TypeError naming the field.
    """

    fp8_format: Format = _field(Format.E4M3, _a_format)
    fp8_quant_fwd_inp: QParams = _params(_block_quantization)
    fp8_quant_fwd_weight: QParams = _params(_block_quantization)
    fp8_quant_bwd_grad: QParams = _params(_block_quantization)
    x_block_scaling_dim: int = _field(1, _one_of(1, 2))
    w_block_scaling_dim: int = _field(2, _one_of(1, 2))
    grad_block_scaling_dim: int = _field(1, _one_of(1, 2))
    fp8_gemm_fprop: MMParams = _params(_split)
    fp8_gemm_dgrad: MMParams = _params(_split)
    fp8_gemm_wgrad: MMParams = _params(_split)
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    backward_override: str | None = _override()

    def _scalings(self) -> tuple[str, ...]:
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        return tuple("block2d" if dim == 2 else "block1d" for dim in dims)


@_recipe
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for each block of 32, for Blackwell."""

    _alignment = 32
    margin: int = _field(0, _A_MARGIN)
    fp8_format: Format = _field(Format.E4M3, _a_format)
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    enable_2d_quantization: bool = _flag()
    backward_override: str | None = _override()

    def _scalings(self) -> tuple[str, ...]:
        return ("mxfp8",) * 3


@_recipe
class NVFP4BlockScaling(Recipe):
    """Four bits, an E4M3 scale for each block of 16 and a float32 one for the tensor, for Blackwell."""

    _alignment = 128
    disable_rht: bool = _flag()
    disable_stochastic_rounding: bool = _flag()
    disable_2d_quantization: bool = _flag()
    row_scaled_activation: bool = _flag()
    nvfp4_4over6: bool = _flag()
    fp4_format: Format = _field(Format.E2M1, _a_format)
    fp8_format: Format = _field(Format.E4M3, _a_format)
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    backward_override: str | None = _override()

    def _scalings(self) -> tuple[str, ...]:
        return ("nvfp4",) * 3


@_recipe
class CustomRecipe(Recipe):
    """qfactory(role) returns the quantizer of each role, or None for a tensor that stays in high precision.

    quantization_alignment: the rows of an operand must be a multiple of it. The other fields are as in
    Float8CurrentScaling.
    """

    qfactory: Callable = field(metadata={"check": _called()})
    fp8_format: Format = _field(Format.HYBRID, _a_format)
    quantization_alignment: int = _field(128, _integer(1))
    fp8_dpa: bool = _flag()
    fp8_mha: bool = _flag()
    backward_override: str | None = _override()

    def _scalings(self) -> tuple[str, ...]:
        return ()  # the factory decides

    @property
    def _alignment(self) -> int:
        return self.quantization_alignment
