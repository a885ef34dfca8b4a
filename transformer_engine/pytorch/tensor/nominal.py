"""nn.Module.float, half and bfloat16 of a module with quantized parameters: they change the nominal dtype, and the
parameters stay quantized. torch handles other parameters as before."""

import functools

import torch

from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor

_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def _keeping_quantized(name: str, dtype: torch.dtype) -> None:
    original = getattr(torch.nn.Module, name)
    if getattr(original, "keeps_quantized", False):
        return

    def converted(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, QuantizedTensor):
            return t if t.dtype is dtype else t.to_dtype(dtype)
        return t.to(dtype) if t.is_floating_point() else t

    @functools.wraps(original)
    def method(self: torch.nn.Module) -> torch.nn.Module:
        if not any(isinstance(p, QuantizedTensor) for p in self.parameters()):
            return original(self)
        return self._apply(converted)

    method.keeps_quantized = True
    setattr(torch.nn.Module, name, method)


def keep_quantized_parameters() -> None:
    """Installs the three methods; a second call changes nothing."""
    for name, dtype in _DTYPES.items():
        _keeping_quantized(name, dtype)
