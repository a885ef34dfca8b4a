"""The order of tensors in memory around torch's kernels of attention: addresses and strides of whole 16 bytes, and
zeros in padding in one pass that keeps the order."""

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal import torch_private
from transformer_engine.pytorch.attention.masks import present_tokens

_BYTES = 16


def starts_aligned(t: torch.Tensor) -> bool:
    """True of a traced tensor, whose place is not known; torch.compile copies inputs at other addresses. And of one
    that torch.func wraps, which has no place."""
    return torch.compiler.is_compiling() or in_torch_func() or t.data_ptr() % _BYTES == 0


def in_torch_func() -> bool:
    """Whether a transform of torch.func is active, which no kernel of functional.attention supports."""
    return not torch.compiler.is_compiling() and torch_private.peek_interpreter_stack() is not None


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


class _Inputs(torch.autograd.Function):
    """Their gradients are zeros in padding as they are: the gradient of the result is, and no token sees padding."""

    @staticmethod
    def forward(ctx, cumulative, batch_first, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(_C.attention_without_padding(tensors, cumulative, batch_first))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *grads


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cumulative, batch_first, out):
        ctx.save_for_backward(cumulative)
        ctx.batch_first = batch_first
        return _C.attention_without_padding((out,), cumulative, batch_first)[0]

    @staticmethod
    def backward(ctx, grad):
        return None, None, _without_padding((grad,), *ctx.saved_tensors, ctx.batch_first, None)[0]


def inputs_without_padding(
    tensors: tuple[torch.Tensor, ...], cumulative: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """q, k and v of a batch with zeros in the rows after each sequence's length, where a causal mask hides padding
    from tokens and result_without_padding() follows."""
    return _without_padding(tensors, cumulative, batch_first, _Inputs)


def result_without_padding(out: torch.Tensor, cumulative: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """The result [.., .., heads, width] likewise, and its gradient."""
    return _without_padding((out,), cumulative, batch_first, _Result)[0]


def _without_padding(tensors, cumulative, batch_first, node):
    """By the engine, a copy and a launch for all; or by one pass over each tensor, which compilers fuse with others and
    which keeps another order of tokens, and float64. node: of autograd, None: there is none."""
    fused = torch.compiler.is_compiling() or in_torch_func()
    if fused or (node is None and torch.is_grad_enabled()) or not all(map(_by_engine, tensors)):
        seq = tensors[0].shape[1 if batch_first else 0]
        padding = ~present_tokens(None, (cumulative, cumulative), (seq, seq))[0]
        padding = (padding if batch_first else padding.t())[:, :, None, None]
        return tuple(zeroed(t, padding) for t in tensors)
    if node is None:
        return _C.attention_without_padding(tensors, cumulative, batch_first)
    made = node.apply(cumulative, batch_first, *tensors)
    return made if isinstance(made, tuple) else (made,)


def _by_engine(t: torch.Tensor) -> bool:
    strides = t.stride()
    return t.dtype != torch.float64 and strides[0] >= strides[1] >= strides[2] >= strides[3] > 0
