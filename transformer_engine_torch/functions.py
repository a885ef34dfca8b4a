"""The C++ functions of the API that clients call: quantization and activations without autograd, by
transformer_engine.pytorch's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.functional import activation, activation_kinds
from transformer_engine.pytorch.tensor import QuantizedTensorStorage, Quantizer


@dataclass
class FP8TensorMeta:
    """Scales and amaxes of a set of tensors, a column each: scale and scale_inv [n], amax_history [length, n]."""

    scale: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None
    amax_history: torch.Tensor | None = None


@torch.no_grad()
def quantize(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    output: QuantizedTensorStorage | None = None,
    noop: torch.Tensor | None = None,
) -> QuantizedTensorStorage:
    """tensor by the quantizer: a new one, or `output` with new values. noop: float32 [1] on the device; unless it holds
    0, output is unchanged."""
    check_tensor("quantize", "tensor", tensor)
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantize: argument 'quantizer' is a {type(quantizer).__name__}, wanted a Quantizer.")
    if output is not None:
        return quantizer.update_quantized(tensor, output, noop_flag=noop)
    if noop is not None:
        raise ValueError(
            "quantize: argument 'noop' is given without 'output', wanted the tensor that may stay unchanged."
        )
    return quantizer(tensor)


@torch.no_grad()
def dequantize(input: QuantizedTensorStorage, otype: DType | torch.dtype) -> torch.Tensor:
    """The values as a plain tensor."""
    if not isinstance(input, QuantizedTensorStorage):
        raise TypeError(f"dequantize: argument 'input' is a {type(input).__name__}, wanted a quantized tensor.")
    return input.dequantize(dtype=otype if isinstance(otype, torch.dtype) else TE_DType_To_Torch[otype])


def _through(quantizer: Quantizer | None, result: torch.Tensor) -> torch.Tensor | QuantizedTensorStorage:
    return result if quantizer is None else quantizer(result)


def _forward(kind: str) -> Callable:
    @torch.no_grad()
    def function(input: torch.Tensor, quantizer: Quantizer | None = None) -> torch.Tensor | QuantizedTensorStorage:
        check_tensor(kind, "input", input)
        return _through(quantizer, activation(input, kind))

    return _named(function, kind, f"{kind} of input, by the quantizer where there is one.")


def _backward(kind: str) -> Callable:
    @torch.no_grad()
    def function(
        grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer | None = None
    ) -> torch.Tensor | QuantizedTensorStorage:
        check_tensor(f"d{kind}", "grad", grad)
        check_tensor(f"d{kind}", "fwd_input", fwd_input)
        return _through(quantizer, torch.ops.te.activation_bwd(grad, fwd_input, kind, [], False)[0])

    return _named(function, f"d{kind}", f"The gradient of {kind}'s input, by the quantizer where there is one.")


def _named(function: Callable, name: str, text: str) -> Callable:
    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__.rpartition(".")[0]  # the module that exports it
    function.__doc__ = text
    return function


@torch.no_grad()
def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Quantizer | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> torch.Tensor | QuantizedTensorStorage:
    """clamped_swiglu of input, by the quantizer where there is one."""
    check_tensor("clamped_swiglu", "input", input)
    return _through(quantizer, activation(input, "clamped_swiglu", (limit, alpha, glu_linear_offset)))


@torch.no_grad()
def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Quantizer | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> torch.Tensor | QuantizedTensorStorage:
    """The gradient of clamped_swiglu's input, by the quantizer where there is one."""
    check_tensor("clamped_dswiglu", "grad", grad)
    check_tensor("clamped_dswiglu", "fwd_input", fwd_input)
    params = [limit, alpha, glu_linear_offset]
    return _through(quantizer, torch.ops.te.activation_bwd(grad, fwd_input, "clamped_swiglu", params, False)[0])


PLAIN_KINDS = [kind for kind in activation_kinds if kind != "clamped_swiglu"]
ACTIVATIONS = {function.__name__: function for make in (_forward, _backward) for function in map(make, PLAIN_KINDS)}
