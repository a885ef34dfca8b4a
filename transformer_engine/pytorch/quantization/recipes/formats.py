"""A recipe's format for one tensor: its element type, its largest value, the sizes that products need. availability.py
answers whether this machine can multiply it."""

import torch

from transformer_engine.common.recipe import Format, Recipe
from transformer_engine.pytorch.constants import DType, TE_DType


def must_be_a_recipe(op: str, recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{op}: argument 'recipe' is {recipe!r}, wanted a recipe of transformer_engine.common.recipe.")


def _format_of(op: str, recipe: object) -> Format:
    must_be_a_recipe(op, recipe)
    if recipe.fp8_format is Format.E2M1:
        raise ValueError(f"{op}: argument 'recipe' has the format E2M1, wanted one of 8 bits: HYBRID, E4M3 or E5M2.")
    return recipe.fp8_format


def get_fp8_torch_dtype(recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """torch.float8_e4m3fn or torch.float8_e5m2: of a tensor of the forward, or of a gradient. Errors: ValueError unless
    `recipe` is a recipe of an 8-bit format."""
    found = _format_of("get_fp8_torch_dtype", recipe)
    e4m3 = found is Format.E4M3 or (found is Format.HYBRID and fprop_tensor)
    return torch.float8_e4m3fn if e4m3 else torch.float8_e5m2


def get_fp8_te_dtype(recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """get_fp8_torch_dtype as a DType."""
    return TE_DType[get_fp8_torch_dtype(recipe, fprop_tensor)]


def get_fp8_max(recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest finite value of that type: 448.0 or 57344.0."""
    return torch.finfo(get_fp8_torch_dtype(recipe, fprop_tensor)).max


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The rows of a product's operand must be a multiple of this number. Errors as get_fp8_torch_dtype."""
    _format_of("get_align_size_for_quantization", recipe)
    return recipe._alignment
