"""The norm inside a fused module: its two parameters, and its options for the functional form."""

import torch

from transformer_engine.pytorch._internal.arguments import check_size
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.config import NormConfig


def declare_norm(module: TransformerEngineBaseModule, norm: NormConfig, *, hidden: int, hidden_name: str) -> None:
    """Adds `layer_norm_weight` and, for LayerNorm, `layer_norm_bias` (None for RMSNorm). hidden_name: the argument
    that `hidden` is."""
    op, normalization = type(module)._op, norm.normalization
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"{op}: argument 'normalization' is {normalization!r}, wanted 'LayerNorm' or 'RMSNorm'.")
    check_size(op, hidden_name, hidden)
    module.normalization = normalization
    module.eps = norm.eps
    module.zero_centered_gamma = norm.zero_centered_gamma
    ones_or_zeros = torch.nn.init.zeros_ if module.zero_centered_gamma else torch.nn.init.ones_
    module._declare("layer_norm_weight", (hidden,), ones_or_zeros, sequence_parallel=module.sequence_parallel)
    if normalization == "LayerNorm":
        zeros = torch.nn.init.zeros_
        module._declare("layer_norm_bias", (hidden,), zeros, sequence_parallel=module.sequence_parallel)
    else:
        module.layer_norm_bias = None


def norm_options(module: TransformerEngineBaseModule) -> dict[str, object]:
    return {
        "rms": module.normalization == "RMSNorm",
        "eps": module.eps,
        "zero_centered_gamma": module.zero_centered_gamma,
    }
