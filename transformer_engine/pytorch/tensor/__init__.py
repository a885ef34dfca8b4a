"""Quantized tensors and the quantizers that make them: the names that clients import, subclass and ask isinstance of.
No tensor is quantized yet, so nothing is an instance of these."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._absent import absent

_QUANTIZED = "quantized tensors are"


@absent(_QUANTIZED)
class Quantizer:
    """Makes quantized tensors of one format."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None: ...


@absent(_QUANTIZED)
class QuantizedTensorStorage:
    """The data of a quantized tensor."""


@absent(_QUANTIZED)
class QuantizedTensor(torch.Tensor):
    """A tensor whose values are quantized."""


@absent(_QUANTIZED)
def prepare_for_saving(*tensors: torch.Tensor | QuantizedTensorStorage | None) -> tuple[list, list]:
    """The plain tensors inside, for save_for_backward, and the objects that they come from."""


@absent(_QUANTIZED)
def restore_from_saved(tensors: Sequence[object], saved_tensors: Sequence[torch.Tensor | None]) -> list:
    """The objects of prepare_for_saving, whole again."""


@absent(_QUANTIZED)
def restore_from_func_ctx(ctx: object) -> list:
    """restore_from_saved with what an autograd context holds."""


@absent(_QUANTIZED)
class Float8Quantizer(Quantizer):
    """FP8 by a scale that is given."""

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: object,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None: ...


@absent(_QUANTIZED)
class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 by the tensor's own amax."""

    def __init__(
        self,
        fp8_dtype: object,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: object | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None: ...


@absent(_QUANTIZED)
class Float8BlockQuantizer(Quantizer):
    """FP8 by blocks."""

    def __init__(
        self,
        fp8_dtype: object,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None: ...


@absent(_QUANTIZED)
class MXFP8Quantizer(Quantizer):
    """FP8 by blocks of 32, Blackwell's."""

    def __init__(
        self, fp8_dtype: object, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None: ...


@absent(_QUANTIZED)
class NVFP4Quantizer(Quantizer):
    """FP4 by blocks of 16, Blackwell's."""


@absent(_QUANTIZED)
class HybridQuantizer(Quantizer):
    """One format for rows, another one for columns."""

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None: ...


@absent(_QUANTIZED)
class IdentityQuantizer(Quantizer):
    """No quantization."""

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None: ...


@absent(_QUANTIZED)
class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale."""


@absent(_QUANTIZED)
class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """FP8 with one scale."""


@absent(_QUANTIZED)
class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 with a scale for each block."""


@absent(_QUANTIZED)
class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """FP8 with a scale for each block."""


@absent(_QUANTIZED)
class MXFP8TensorStorage(QuantizedTensorStorage):
    """FP8 with a power-of-two scale for each 32 elements."""


@absent(_QUANTIZED)
class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """FP8 with a power-of-two scale for each 32 elements."""


@absent(_QUANTIZED)
class NVFP4TensorStorage(QuantizedTensorStorage):
    """FP4 with a scale for each 16 elements."""


@absent(_QUANTIZED)
class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """FP4 with a scale for each 16 elements."""


@absent(_QUANTIZED)
class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """One format for rows, another one for columns."""


@absent(_QUANTIZED)
class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """One format for rows, another one for columns."""


@absent(_QUANTIZED)
class IdentityTensorStorage(QuantizedTensorStorage):
    """Values as they are."""


@absent(_QUANTIZED)
class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """Values as they are."""


@absent(_QUANTIZED)
class GroupedTensorStorage:
    """The tensors of a group in one buffer."""


@absent(_QUANTIZED)
class GroupedTensor(GroupedTensorStorage, torch.Tensor):
    """The tensors of a group in one buffer."""
