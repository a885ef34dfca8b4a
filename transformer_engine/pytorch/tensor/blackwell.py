"""Formats that need a Blackwell GPU: MXFP8 and NVFP4. Their classes can be made and inspected everywhere; every use
raises, with the name and the reason."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch._internal.absent import refusal
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.arguments import fp8_dtype_of
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, COLUMNWISE_SCALE, ROWWISE, ROWWISE_SCALE
from transformer_engine.pytorch.tensor.parts import Part
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_BLOCKS = {
    "_rowwise_data": Part("rowwise_data", ROWWISE),
    "_columnwise_data": Part("columnwise_data", COLUMNWISE),
    "_rowwise_scale_inv": Part("rowwise_scale_inv", ROWWISE_SCALE),
    "_columnwise_scale_inv": Part("columnwise_scale_inv", COLUMNWISE_SCALE),
}


def _refuse(name: str, format: str) -> Any:
    raise refusal(name, f"{format}, whose products need a Blackwell GPU, is", "use Float8BlockQuantizer on Hopper")


class _BlackwellStorage(QuantizedTensorStorage):
    """Its construction raises: no code here could read it."""

    _format = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_BlackwellStorage":
        _refuse(cls.__name__, cls._format)


class MXFP8TensorStorage(_BlackwellStorage):
    """FP8 with a power-of-two scale (uint8, E8M0) for each 32 elements."""

    _format = "MXFP8"
    _parts: ClassVar[dict[str, Part]] = _BLOCKS
    _details: ClassVar[dict[str, str]] = {
        "_fp8_dtype": "fp8_dtype",
        "_with_gemm_swizzled_scales": "with_gemm_swizzled_scales",
        "_quantizer": "quantizer",
    }


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """FP8 with a power-of-two scale for each 32 elements."""


class NVFP4TensorStorage(_BlackwellStorage):
    """FP4 with an E4M3 scale for each 16 elements and a float32 one for the tensor."""

    _format = "NVFP4"
    _parts: ClassVar[dict[str, Part]] = {
        **_BLOCKS,
        "_amax_rowwise": Part("amax_rowwise", ROWWISE_SCALE),
        "_amax_columnwise": Part("amax_columnwise", COLUMNWISE_SCALE),
    }
    _details: ClassVar[dict[str, str]] = {"_fp4_dtype": "fp4_dtype", "_quantizer": "quantizer"}


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """FP4 with an E4M3 scale for each 16 elements and a float32 one for the tensor."""


class _BlackwellQuantizer(Quantizer, python_written=False):
    """Can be made, copied and inspected; quantizing raises."""

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        _refuse(type(self).__name__, self.storage_class._format)

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        _refuse(type(self).__name__, self.storage_class._format)

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensorStorage:
        _refuse(type(self).__name__, self.storage_class._format)

    def make_empty(self, shape: Sequence[int], **options: Any) -> QuantizedTensorStorage:
        _refuse(type(self).__name__, self.storage_class._format)

    def multi_quantize(self, tensors: Sequence[torch.Tensor]) -> list[QuantizedTensorStorage]:
        _refuse(type(self).__name__, self.storage_class._format)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        return False

    def _native(self) -> Any:
        _refuse(type(self).__name__, self.storage_class._format)


class MXFP8Quantizer(_BlackwellQuantizer, python_written=False):
    """FP8 by blocks of 32, for Blackwell."""

    storage_class = MXFP8TensorStorage
    tensor_class = MXFP8Tensor
    _configuration: ClassVar[dict[str, str]] = {"dtype": "fp8_dtype", "with_2d_quantization": "with_2d_quantization"}

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype_of(type(self).__name__, fp8_dtype)
        self.with_2d_quantization = bool(with_2d_quantization)

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> type:
        return MXFP8BlockScaling


class NVFP4Quantizer(_BlackwellQuantizer, python_written=False):
    """FP4 by blocks of 16, for Blackwell. Its many settings are stored unchecked."""

    storage_class = NVFP4TensorStorage
    tensor_class = NVFP4Tensor

    def __init__(
        self, fp4_dtype: Any = DType.kFloat4E2M1, *, rowwise: bool = True, columnwise: bool = True, **settings: Any
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp4_dtype
        for name, value in settings.items():
            setattr(self, name, value)

    def _get_compatible_recipe(self) -> type:
        return NVFP4BlockScaling
