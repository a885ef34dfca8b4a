"""The norm inside a fused module: its two parameters, its options, and how they reach the functional form."""

import torch

from transformer_engine.pytorch._arguments import check_size
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class NormParameters(TransformerEngineBaseModule):
    """Adds `layer_norm_weight` and, for LayerNorm, `layer_norm_bias` (None for RMSNorm)."""

    def _declare_norm(
        self, op: str, hidden: int, hidden_name: str, *, normalization: str, eps: float, zero_centered: bool
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"{op}: argument 'normalization' is {normalization!r}, wanted 'LayerNorm' or 'RMSNorm'.")
        check_size(op, hidden_name, hidden)
        self.normalization = normalization
        self.eps = eps
        self.zero_centered_gamma = zero_centered
        ones_or_zeros = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
        self._declare("layer_norm_weight", (hidden,), ones_or_zeros, sequence_parallel=self.sequence_parallel)
        if normalization == "LayerNorm":
            self._declare("layer_norm_bias", (hidden,), torch.nn.init.zeros_, sequence_parallel=self.sequence_parallel)
        else:
            self.layer_norm_bias = None

    def _norm_options(self) -> dict[str, object]:
        return {
            "rms": self.normalization == "RMSNorm",
            "eps": self.eps,
            "zero_centered_gamma": self.zero_centered_gamma,
        }
