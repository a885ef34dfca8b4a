"""Computations of tensor parallelism on one rank, besides its products. Formulas: transformer_engine/comm.h.
distributed/ communicates; nothing here does."""

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


def comm_interleave(shards: torch.Tensor) -> torch.Tensor:
    """shards[0], shards[1], ... side by side: joins shards that ranks quantized and gathered into one tensor's layout.

    Shapes: shards [ranks, rows, m] -> [rows, ranks * m], up to 128 ranks. Any strides; dense rows are not copied.
    Dtypes: uint8 (columnwise FP8 data; the result's rows and pitch are padded to 16 with zeros, as products need them)
    or float32 (rowwise scales of 1x128 blocks, columnwise ones of 128x128, without their padding; the result has the
    padding of the joined tensor: columns up to a multiple of 4, zeros). Not differentiable.
    Errors: ValueError naming the argument.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.comm_interleave(shards)
    return _C.comm_interleave(shards)
