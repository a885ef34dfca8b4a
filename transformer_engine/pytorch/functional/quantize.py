"""FP8 quantization by quantizers without state, as plain tensors. Formulas, layouts: transformer_engine/quantize.h."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def quantize(
    x: torch.Tensor, spec: Sequence[int], *, rowwise: bool = True, columnwise: bool = False, dbias: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rowwise, rowwise_scale_inv, columnwise, columnwise_scale_inv, dbias), each empty unless it is asked for.

    Shapes: x [..., cols], leading dimensions folded into rows; rowwise uint8 [rows, cols], columnwise its transpose;
        scales as in transformer_engine/quantize.h, per-tensor ones as [scale_inv, scale].
    spec: `_C.Quantizer(...).spec` of kind current, block1d or block2d.
    Errors: ValueError for a wrong dtype or spec, NotImplementedError for a kind with state.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.quantize(x, list(spec), rowwise, columnwise, dbias)
    return _C.quantize_op(x, list(spec), rowwise, columnwise, dbias)


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, *, scaling: int, e5m2: bool, columnwise: bool, dtype: torch.dtype
) -> torch.Tensor:
    """data * scale_inv in `dtype`, [rows, cols] for data of either direction.

    scaling: 0 per tensor, 1 for 1x128 blocks, 2 for 128x128 blocks.
    Errors: ValueError for shapes or dtypes that do not fit.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.dequantize(data, scale_inv, scaling, e5m2, columnwise, dtype)
    return _C.dequantize_op(data, scale_inv, scaling, e5m2, columnwise, dtype)


def quantize_range_amax(
    x: torch.Tensor, amaxes: torch.Tensor, shape: tuple[int, int], start: int, rounded_to: torch.dtype, *, scaling: int
) -> None:
    """Writes the amaxes of a range of a matrix, the 1-D x: of elements [start, start + len(x)) of `shape`.

    amaxes: float32 [1], or [ceil(rows / 128), ceil(cols / 128)] with 128x128 blocks; 0 for blocks outside of the range.
    scaling: 0 per tensor, 2 for 128x128 blocks. rounded_to: the dtype that values are rounded to first.
    Errors: ValueError for shapes, dtypes and ranges that do not fit, NotImplementedError for 1x128 blocks.
    """
    arguments = x, amaxes, *shape, start, rounded_to, scaling
    if torch.compiler.is_compiling():
        return torch.ops.te.quantize_range_amax(*arguments)
    return _C.quantize_range_amax(*arguments)


def quantize_range_cast(
    x: torch.Tensor,
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    shape: tuple[int, int],
    start: int,
    rounded_to: torch.dtype,
    spec: Sequence[int],
    *,
    amaxes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    """Writes the bytes of a range of a matrix, the 1-D x, and the scale_inv of the matrix.

    data: uint8, the matrix, of which the range alone is written, or 1-D, the range. amaxes: of the matrix, in the form
    of quantize_range_amax. scale: [1], of delayed scaling, whose `amax` [1] becomes the larger of itself and amaxes; in
    current scaling `amax` becomes amaxes. spec: `_C.Quantizer(...).spec`.
    Errors: as of quantize_range_amax.
    """
    arguments = x, data, scale_inv, amaxes, scale, amax, *shape, start, rounded_to, list(spec)
    if torch.compiler.is_compiling():
        return torch.ops.te.quantize_range_cast(*arguments)
    return _C.quantize_range_cast(*arguments)
