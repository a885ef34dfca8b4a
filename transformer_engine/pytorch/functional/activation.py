"""Activations and gated activations (the GLU family) as functions. Formulas: transformer_engine/activation.h."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C

# name -> gated; a gated kind reads the last dimension as two halves [a | b] and halves it.
activation_kinds: dict[str, bool] = dict(_C.activation_kinds())


def activation(x: torch.Tensor, kind: str, params: Sequence[float] = ()) -> torch.Tensor:
    """y = act(x), or act(a) * b with x = [a | b] for the gated kinds.

    Shapes: x [..., n] -> y [..., n], or [..., n / 2] for gated kinds.
    Dtypes: float32, float16, bfloat16; arithmetic in float32, one rounding.
    params: (limit, alpha, glu_linear_offset) for clamped_swiglu, empty for its defaults (7, 1.702, 1).
    Saves: x alone; the backward recomputes what it needs.
    Errors: ValueError for an unknown kind, an odd gated dimension or a wrong dtype.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.activation(x, kind, list(params))
    return _C.activation(x, kind, list(params))


def scaled_activation(x: torch.Tensor, scale: torch.Tensor, kind: str, params: Sequence[float] = ()) -> torch.Tensor:
    """y[r] = act(x[r]) * scale[r] for each row r: activation(x) * scale.unsqueeze(-1) in x's dtype, to the same bits.

    Shapes: x as in activation, scale x.shape[:-1]. Dtypes: x as in activation, scale float32 or x's dtype.
    Saves: x and scale. The gradient of scale is a row's sum of dy * act(x), in float32 in a fixed order.
    Errors: as activation; ValueError for a scale whose shape, dtype or device does not fit.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.scaled_activation(x, scale, kind, list(params))
    return _C.scaled_activation(x, scale, kind, list(params))
