"""Small fused functions and their switches by the names that clients import: they are torch's operations here, which
torch.compile fuses with its surroundings. Nothing is compiled or warmed up."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def jit_fuser(func: _Function) -> _Function:
    """A decorator for functions to fuse: the function itself."""
    return func


def no_torch_dynamo(recursive: bool = True) -> Callable[[_Function], _Function]:
    """Makes a decorator: torch.compile does not look into the function. recursive: nor into what it calls."""
    return lambda func: torch.compiler.disable(func, recursive=recursive)


def set_jit_fusion_options() -> None:
    """No options exist."""


def bias_gelu_fused(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gelu(inp + bias) in its tanh form; a bias that is None or empty adds nothing."""
    return torch.nn.functional.gelu(inp + bias if _has_elements(bias) else inp, approximate="tanh")


def bgrad_dgelu_fused(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(gradient of bias, of inp) of bias_gelu_fused; the bias's is a sum over dimension 0, or None without a bias."""
    has_bias = _has_elements(bias)
    gradient = torch.ops.aten.gelu_backward(grad_output, inp + bias if has_bias else inp, approximate="tanh")
    return (gradient.sum(0) if has_bias else None), gradient


def l2normalization_fused(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32 and rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """residual + dropout(x + bias)."""
    added = x + bias if _has_elements(bias) else x
    return residual + torch.nn.functional.dropout(added, p=prob, training=training)


def bias_dropout_add_fused_train(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """bias_dropout_add in training."""
    return bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """bias_dropout_add out of training: residual + x + bias."""
    return bias_dropout_add(x, bias, residual, prob, False)


def get_bias_dropout_add(training: bool) -> Callable[..., torch.Tensor]:
    """The function (x, bias, residual, prob) for training, or for inference."""
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


def warmup_jit_bias_dropout_add(hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int) -> None:
    """No warm-up is needed."""


def warmup_jit_bias_dropout_add_all_dtypes(hidden_size: int, seq_length: int, micro_batch_size: int) -> None:
    """No warm-up is needed."""


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """No warm-up is needed."""


def warmup_jit_bias_gelu_all_dtypes(ffn_hidden_size: int, seq_length: int, micro_batch_size: int) -> None:
    """No warm-up is needed."""


def _has_elements(bias: torch.Tensor | None) -> bool:
    return bias is not None and bias.numel() > 0
