"""All formats and quantizers by name, and the quantizer for each scaling of a recipe. Their files register them; code
that must not import them looks them up here. It computes nothing."""

from typing import Any, NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.constants import DType

# The possible dtypes of the values of a quantized tensor: its nominal dtype.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Class name -> class, of every format and of every quantizer: files find them by it.
FORMATS: dict[str, type] = {}
QUANTIZERS: dict[str, type] = {}

# The name of a scaling in a recipe (Recipe._scalings) -> the quantizer that does it.
SCALINGS: dict[str, type] = {}


class Wanted(NamedTuple):
    """A recipe's request for the quantizer of one tensor. column: the module's scale between steps. recipe: for further
    questions."""

    scaling: str
    fp8_dtype: DType
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    device: torch.device | None = None
    column: Any = None
    recipe: Recipe | None = None


class AnyQuantized:
    """The base of every quantized storage: `isinstance` for files of lower layers."""
