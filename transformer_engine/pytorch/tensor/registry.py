"""Who is there: every format and every quantizer, by name, and which of them does what a recipe wants. Their files tell
it of themselves; whoever is not to know them asks here. It computes nothing."""

from typing import Any, NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.constants import DType

# What the values of a quantized tensor may be: its nominal dtype.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Class name -> class, of every format and of every quantizer: how a file finds them again.
FORMATS: dict[str, type] = {}
QUANTIZERS: dict[str, type] = {}

# How a recipe wants a tensor to be scaled (Recipe._scalings) -> the quantizer that does it.
SCALINGS: dict[str, type] = {}


class Wanted(NamedTuple):
    """What a recipe wants of the quantizer of one tensor. column: where a module keeps its scale between steps. recipe:
    where more may be asked of it."""

    scaling: str
    fp8_dtype: DType
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    device: torch.device | None = None
    column: Any = None
    recipe: Recipe | None = None


class AnyQuantized:
    """What every quantized storage is, whatever its format: `isinstance` for files below them."""
