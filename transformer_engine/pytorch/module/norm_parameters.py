"""The norm inside a fused module: its two parameters, its options, and how they reach the functional form."""

from collections.abc import Mapping

import torch

from transformer_engine.pytorch._internal.arguments import check_size
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def declare_norm(
    module: TransformerEngineBaseModule, hidden: int, hidden_name: str, given: Mapping[str, object]
) -> None:
    """Adds `layer_norm_weight` and, for LayerNorm, `layer_norm_bias` (None for RMSNorm). given: the constructor's
    arguments by name; hidden_name: the one that hidden is."""
    op, normalization = type(module)._op, given["normalization"]
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"{op}: argument 'normalization' is {normalization!r}, wanted 'LayerNorm' or 'RMSNorm'.")
    check_size(op, hidden_name, hidden)
    module.normalization = normalization
    module.eps = given["eps"]
    module.zero_centered_gamma = given["zero_centered_gamma"]
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
