"""Checks of arguments of quantizers: the type of FP8 data, the tensor to quantize. Nothing is quantized here."""

import torch

from transformer_engine.pytorch.constants import DType, TE_DType
from transformer_engine.pytorch.tensor.registry import FLOATS, AnyQuantized
from transformer_engine.pytorch.tensor.values_view import values_of

_FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)


def fp8_dtype_of(op: str, value: object) -> DType:
    """A DType, its number, or torch's dtype, as a DType."""
    found = TE_DType.get(value) if isinstance(value, torch.dtype) else value
    if isinstance(found, bool) or found not in _FP8:
        raise ValueError(f"{op}: argument 'fp8_dtype' is {value!r}, wanted DType.kFloat8E4M3 or DType.kFloat8E5M2.")
    return DType(found)


def source_of(op: str, tensor: object) -> torch.Tensor:
    """The plain tensor to quantize. Errors: TypeError unless it is a tensor, ValueError unless its dtype is float32,
    float16 or bfloat16."""
    tensor = tensor.dequantize() if isinstance(tensor, AnyQuantized) else values_of(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: argument 'tensor' is a {type(tensor).__name__}, wanted a tensor.")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{op}: argument 'tensor' is {tensor.dtype}, wanted float32, float16 or bfloat16.")
    return tensor
