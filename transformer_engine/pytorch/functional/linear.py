"""Linear products as functions: plain, behind a norm, behind an activation. One autograd family serves all three."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weight^T + bias.

    Shapes: x [..., in_features], weight [out_features, in_features], bias [out_features] -> y [..., out_features].
    Dtypes: float32, float16, bfloat16, one for all (torch.autocast casts); float32 accumulation.
    Saves: x for weight's gradient, weight for x's; neither where that gradient is not wanted.
    Errors: ValueError naming the argument whose shape, dtype or device does not fit.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.linear(x, weight, bias)
    return _C.linear(x, weight, bias)


def normalization_linear(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rms: bool,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = norm(h) weight^T + bias with h = x + residual (or x); RMSNorm when rms, else LayerNorm.

    Returns (y, norm output, h); h is an empty tensor where there was no residual. Gradients may arrive at all three:
    what arrives at h is added inside the norm's backward.
    Shapes: x, residual, norm output, h [..., in_features]; y [..., out_features].
    Saves: h, the norm's statistics and output, gamma, weight; less where gradients are not wanted.
    """
    args = (x, residual, gamma, beta, weight, bias, eps, rms, zero_centered_gamma)
    if torch.compiler.is_compiling():
        return torch.ops.te.normalization_linear(*args)
    return _C.normalization_linear(*args)


def activation_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str,
    params: Sequence[float] = (),
) -> torch.Tensor:
    """y = act(x) weight^T + bias, the second half of an MLP. kind and params as in functional.activation.

    Saves: x (the pre-activation) and weight. The activation is not kept: the backward writes it again.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.activation_linear(x, weight, bias, kind, list(params))
    return _C.activation_linear(x, weight, bias, kind, list(params))


def noop_cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several weights as one tensor; no copy where they lie one behind the other in one storage."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling():
        return torch.cat(tuple(parts))
    return _C.noop_cat(list(parts))
