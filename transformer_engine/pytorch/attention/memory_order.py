"""The order of tensors in memory around torch's kernels of attention: addresses and strides of whole 16 bytes, and
zeros in padding in one pass that keeps the order."""

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal import torch_private

_BYTES = 16


def starts_aligned(t: torch.Tensor) -> bool:
    """True of a traced tensor, whose place is not known; torch.compile copies inputs at other addresses. And of one
    that torch.func wraps, which has no place."""
    return torch.compiler.is_compiling() or _is_wrapped() or t.data_ptr() % _BYTES == 0


def _is_wrapped() -> bool:
    return torch_private.peek_interpreter_stack() is not None


def aligned(t: torch.Tensor) -> torch.Tensor:
    """t as torch's kernels on a GPU read memory, 16 bytes at once. They do not check that: of other memory they return
    wrong values or fail the device. t itself, or a copy."""
    unit = _BYTES // t.element_size()
    *others, last = t.stride()
    odd = any(stride % unit for size, stride in zip(t.shape, others) if size != 1)
    if last == 1 and not odd and starts_aligned(t):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def by_token(out: torch.Tensor, order: tuple[int, ...], *, gradient: str) -> torch.Tensor:
    """A result [b, h, s, d] of torch's kernels in another order of dimensions, with a gradient that the kernel's
    backward reads. gradient: of AttentionPath."""
    if not gradient or not out.requires_grad:
        return out.permute(order)
    run = torch.ops.te.attention_result if torch.compiler.is_compiling() else _C.attention_result
    return run(out, order, gradient == "strides")


def zeroed(t: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Zeros in rows of t, in one pass that keeps the order of its dimensions in memory; masked_fill takes two, in
    another order."""
    return torch.where(where, 0.0, t)
