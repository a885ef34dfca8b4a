"""LayerNorm: a drop-in for torch.nn.LayerNorm on the fused core."""

import torch

from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch.module.normalization import BEYOND, Normalization, NormalizedShape


class LayerNorm(Normalization):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dimensions.

    Parameters `weight` and `bias` (always both); with zero_centered_gamma `weight` is stored less one and starts at
    zero. sequence_parallel, if given, becomes an attribute of the parameters. hidden_size and dtype are other names of
    normalized_shape and params_dtype. kwargs: device, dtype, sm_margin (accepted; kernels need none).
    """

    _rms = False

    @check_keywords(*BEYOND)
    def __init__(
        self,
        normalized_shape: NormalizedShape = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: NormalizedShape = None,
        **kwargs,
    ) -> None:
        super().__init__()
        self._build(normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, **kwargs)
