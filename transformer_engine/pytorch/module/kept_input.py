"""save_original_input: the call saves its input unquantized, shared with other users of that tensor, and the backward
quantizes it again. Recipes under which that would change the result are refused."""

import torch

from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


def keeps_input(module: torch.nn.Module, quantized: bool) -> bool:
    """Whether a call of a module with `save_original_input` saves its input unquantized. Errors: ValueError under
    delayed scaling, and under backward_override="dequantized"."""
    if not (quantized and module.save_original_input):
        return False
    start = f"{type(module).__name__}: argument 'save_original_input' is True under"
    recipe = current_state().chosen_recipe()
    if recipe.backward_override == "dequantized":
        refuse(
            f"{start} backward_override='dequantized', whose backward reads the quantized input in place of the "
            "original; use backward_override='high_precision', or build the module without it.",
            ValueError,
        )
    if not torch.compiler.is_compiling() and module.runtime.quantization.own.rule is not None:
        raise ValueError(
            f"{start} delayed scaling, whose scale may have changed before the backward; use Float8CurrentScaling or "
            "Float8BlockScaling, or build the module without it."
        )
    return True
