"""What tensor parallelism computes on one rank beside its products. Formulas: transformer_engine/comm.h. Nothing here
communicates: that is distributed's."""

import torch

from transformer_engine.pytorch import _C


def comm_ordered_sum(partials: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """partials[0] + partials[1] + ... + bias, in this order, in float32, rounded once.

    Shapes: partials [ranks, ..., cols], up to 128 ranks; bias [cols]. Returns a new, contiguous [..., cols].
    Dtypes: float32, float16, bfloat16, the same for all. Not differentiable.
    Errors: ValueError naming the argument.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.comm_ordered_sum(partials, bias)
    return _C.comm_ordered_sum(partials, bias)
