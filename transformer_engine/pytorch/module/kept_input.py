"""save_original_input: whether a call keeps its input as it is, shared with who else keeps it, and its backward
quantizes it again. Refuses recipes with which that would be something else."""

import torch

from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


def keeps_input(module: torch.nn.Module, quantized: bool) -> bool:
    """Of a call of a module that has `save_original_input`. Errors: ValueError under delayed scaling, and under
    backward_override="dequantized"."""
    if not (quantized and module.save_original_input):
        return False
    asked = f"{type(module).__name__}: argument 'save_original_input' is True under"
    recipe = current_state().chosen_recipe()
    if recipe.backward_override == "dequantized":
        refuse(
            f"{asked} backward_override='dequantized', whose backward reads the quantized input in place of the "
            "original; use backward_override='high_precision', or build the module without it.",
            ValueError,
        )
    if not torch.compiler.is_compiling() and module.runtime.quantization.own.rule is not None:
        raise ValueError(
            f"{asked} delayed scaling, whose scale may be another one in the backward; use Float8CurrentScaling or "
            "Float8BlockScaling, or build the module without it."
        )
    return True
