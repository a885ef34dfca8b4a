"""LayerNorm and RMSNorm as a function, with a fused residual add. Formulas: transformer_engine/normalization.h."""

import torch

from transformer_engine.pytorch import _C


def normalization(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    rms: bool,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = (h - mean) * rstd * g + beta with h = x + residual (or x), statistics over the last dimension.

    g = gamma, or gamma + 1 when zero_centered_gamma; RMSNorm (rms) has mean 0 and no beta.
    Returns (y, h); h is an empty tensor if there was no residual. A gradient of h is added inside the backward.
    Shapes: x, residual, y, h [..., hidden] with hidden from 1 to 65536; gamma, beta [hidden].
    Dtypes: float32, float16, bfloat16; gamma (and beta, like it) of any of these, whatever x has. Arithmetic in
    float32, one rounding. torch.autocast casts all.
    Saves: h, gamma, rstd and, for LayerNorm, mean (float32, one each a row).
    Errors: ValueError naming the argument whose shape, dtype or device does not fit; NotImplementedError beyond hidden
    65536.
    """
    args = (x, residual, gamma, beta, eps, rms, zero_centered_gamma)
    if torch.compiler.is_compiling():
        return torch.ops.te.normalization(*args)
    return _C.normalization(*args)
