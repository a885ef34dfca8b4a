"""The matrix product with its epilogues, as a function without autograd. Formulas: transformer_engine/gemm.h."""

import torch

from transformer_engine.pytorch import _C


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str = "TN",
    *,
    epilogue: str = "none",
    bias: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layouts TN: d = b a^T (fprop: a = weight), NN: d = b a (dgrad), NT: d = b^T a (wgrad: a = input, b = gradient).

    Epilogues: "none", "bias", "gelu" (returns the pre-activation too), "dgelu" (reads it from aux), "bgrad" (layout NT:
    returns b's column sums too). Returns (d, extra); extra is empty if the epilogue has none. d is 2-D.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.gemm(a, b, layout, epilogue, bias, aux, out_dtype)
    return _C.gemm(a, b, layout, epilogue, bias, aux, out_dtype)


def gemm_accumulate(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    out: torch.Tensor,
    *,
    bias_grad: bool = False,
    overwrite: bool = False,
) -> torch.Tensor:
    """out += the product (out = the product with overwrite), in place, in out's dtype (float32 or the operands').
    Returns the bias gradient of "bgrad"."""
    if torch.compiler.is_compiling():
        return torch.ops.te.gemm_accumulate(a, b, layout, out, bias_grad, overwrite)
    return _C.gemm_accumulate(a, b, layout, out, bias_grad, overwrite)
