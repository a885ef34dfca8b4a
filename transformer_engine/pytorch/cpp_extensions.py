"""Products by the names that frameworks call them by, on plain and on quantized tensors. No autograd, no arithmetic of
its own: the gemm room's (functional/gemm.py) and the FP8 products of the engine."""

from __future__ import annotations

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import gemm, gemm_accumulate

# Layout -> which direction's data of A and of B an FP8 product reads.
COLUMNWISE = {"TN": (False, False), "NN": (True, False), "NT": (True, True)}


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    *,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Layouts TN: B A^T (fprop: A = weight), NN: B A (dgrad: B = output gradient), NT: B^T A (wgrad: A = input, B =
    output gradient). A and B are both plain or both quantized, these with the data that the layout reads: columnwise
    where it has an N of A or a T of B.

    bias: added; with grad (layout NT) its gradient, the sum of B's rows, is returned in its dtype instead. out: written
    in place, or added to with accumulate. quantization_params: a quantizer that the result goes through.
    use_split_accumulator: sums in float32 for per-tensor FP8; blocks and plain tensors always have it.
    Returns (out, bias gradient or None, None, None); with TN and NN out has B's leading dimensions.
    Errors: ValueError for one plain and one quantized operand, accumulate without out, grad with bias but no layout NT.
    """
    if layout not in COLUMNWISE:
        raise ValueError(f"general_gemm: argument 'layout' is {layout!r}, wanted 'TN', 'NN' or 'NT'.")
    quantized = [hasattr(t, "_native") for t in (A, B)]
    if quantized[0] != quantized[1]:
        which = "AB"[quantized[1]]
        raise ValueError(
            f"general_gemm: argument '{which}' alone is quantized, wanted both or neither: dequantize() it."
        )
    if accumulate and out is None:
        raise ValueError("general_gemm: argument 'accumulate' is True without 'out', wanted the tensor to add to.")
    if grad and bias is not None and layout != "NT":
        raise ValueError(
            f"general_gemm: argument 'bias' with grad in layout {layout}, wanted NT, where B is a gradient."
        )
    with torch.no_grad():
        wanted = out.dtype if out is not None else A.dtype if out_dtype is None else out_dtype
        product = _quantized if quantized[0] else _plain
        result = product(A, B, layout, wanted, None if grad else bias, out, accumulate, use_split_accumulator)
        bias_grad = None
        if grad and bias is not None:
            rows = B.dequantize(dtype=torch.float32) if quantized[1] else B
            bias_grad = rows.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype)
        if out is None and layout != "NT":
            result = result.view(*B.shape[:-1], result.shape[-1])
        if quantization_params is not None:
            result = quantization_params(result)
        return result, bias_grad, None, None


def _plain(A, B, layout, dtype, bias, out, accumulate, split):
    if out is not None and bias is None:
        gemm_accumulate(A, B, layout, out, overwrite=not accumulate)
        return out
    d, _ = gemm(A, B, layout, epilogue="none" if bias is None else "bias", bias=bias, out_dtype=dtype)
    return _into(out, d, accumulate)


def _quantized(A, B, layout, dtype, bias, out, accumulate, split):
    (a, b), (a_columnwise, b_columnwise) = (A._native(), B._native()), COLUMNWISE[layout]
    fast = a.scaling == 0 and b.scaling == 0 and not split
    if out is not None and bias is None:
        _C.gemm_fp8_accumulate(a, a_columnwise, b, b_columnwise, out, not accumulate, fast)
        return out
    return _into(out, _C.gemm_fp8(a, a_columnwise, b, b_columnwise, dtype, bias, fast), accumulate)


def _into(out, d, accumulate):
    if out is None:
        return d
    d = d.view(out.shape)
    return out.add_(d) if accumulate else out.copy_(d)
