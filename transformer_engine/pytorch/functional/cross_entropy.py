"""Cross entropy as functions: of logits, over which the gradient is written, and of a linear product whose logits are
never there all at once. Formula: transformer_engine/cross_entropy.h."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    ignore_idx: int = -100,
    group: str = "",
    ranks: int = 1,
) -> torch.Tensor:
    """Each row's loss against one class, or with reduce_loss their mean over targets that are not ignore_idx.

    Shapes: logits [..., classes], contiguous; target [...]; loss like target, or a scalar. With a group, by its name,
    of several ranks: the classes are divided over them in their order, equally many on each, and targets are global.
    Dtypes: logits float32, float16 or bfloat16; target int64; the loss float32.
    Mutates: where a gradient is wanted, logits hold it afterwards, in eager mode; under torch.compile it has memory of
    its own.
    Errors: ValueError naming the argument, a target out of range among them on the CPU; on a GPU its loss is NaN.
    """
    args = (logits, target, label_smoothing, reduce_loss, ignore_idx, group, ranks)
    if torch.compiler.is_compiling():
        return torch.ops.te.cross_entropy(*args)
    return _C.cross_entropy(*args)


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    reduce_loss: bool = True,
    ignore_idx: int = -100,
    float32_sum: bool = True,
    quantization: Sequence[int] = (),
    group: str = "",
    ranks: int = 1,
) -> torch.Tensor:
    """cross_entropy(hidden weight^T + bias, target), chunk of tokens after chunk.

    Shapes: hidden [..., features], weight [classes, features], bias [classes], target [...]. quantization: the products
    are FP8 ones (_C.ProductQuantization.spec). float32_sum: the chunks' parts of the weight's gradient are added up in
    float32; else in weight's dtype. group, ranks: weight and bias are this rank's classes; hidden is the same on each,
    and its gradient what these classes bring to it, a part of a sum.
    Saves: with reduce_loss the gradients, made in forward; else hidden, weight, bias and target.
    """
    args = (hidden, weight, bias, target, label_smoothing, reduce_loss, ignore_idx, float32_sum, list(quantization))
    if torch.compiler.is_compiling():
        return torch.ops.te.linear_cross_entropy(*args, group, ranks)
    return _C.linear_cross_entropy(*args, group, ranks)
