"""FP8 quantization by quantizers without state, as plain tensors. Formulas, layouts: transformer_engine/quantize.h."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def quantize(
    x: torch.Tensor, spec: Sequence[int], *, rowwise: bool = True, columnwise: bool = False, dbias: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv, dbias), each empty where it is not wanted.

    Shapes: x [..., cols], leading dimensions folded into rows; rowwise uint8 [rows, cols], columnwise its transpose;
        scales as in transformer_engine/quantize.h, per-tensor ones as [scale_inv, scale].
    spec: `_C.Quantizer(...).spec` of kind current, block1d or block2d.
    Errors: ValueError for a wrong dtype or spec, NotImplementedError for a kind that keeps state.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.quantize(x, list(spec), rowwise, columnwise, dbias)
    return _C.quantize_op(x, list(spec), rowwise, columnwise, dbias)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, *, scaling: int, e5m2: bool, columnwise: bool, dtype: torch.dtype
) -> torch.Tensor:
    """data * scale_inv in `dtype`, [rows, cols] whichever direction the data are of.

    scaling: 0 per tensor, 1 for 1x128 blocks, 2 for 128x128 blocks.
    Errors: ValueError for shapes or dtypes that do not fit.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.dequantize(data, scale_inv, scaling, e5m2, columnwise, dtype)
    return _C.dequantize_op(data, scale_inv, scaling, e5m2, columnwise, dtype)
