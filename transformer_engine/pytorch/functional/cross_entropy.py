"""Cross entropy as functions: of logits, which the gradient overwrites, and of a linear product whose logits are never
all in memory at once. Formula: transformer_engine/cross_entropy.h."""

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
    of several ranks: the classes are divided over them in order, equally many on each, and targets are global.
    Dtypes: logits float32, float16 or bfloat16; target int64; the loss float32.
    Mutates: if a gradient is needed, logits hold it afterwards, in eager mode; under torch.compile the gradient has
    memory of its own.
    Errors: ValueError naming the argument, also for a target out of range on the CPU; on a GPU its loss is NaN.
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
    """cross_entropy(hidden weight^T + bias, target), in chunks of tokens.

    Shapes: hidden [..., features], weight [classes, features], bias [classes], target [...]. quantization: the products
    are FP8 (_C.ProductQuantization.spec). float32_sum: the chunks' parts of the weight's gradient are added up in
    float32; otherwise in weight's dtype. group, ranks: weight and bias are this rank's classes; hidden is the same on
    each rank, and its gradient is this rank's part of a sum.
    Saves: with reduce_loss the gradients, made in forward; otherwise hidden, weight, bias and target.
    """
    args = (hidden, weight, bias, target, label_smoothing, reduce_loss, ignore_idx, float32_sum, list(quantization))
    if torch.compiler.is_compiling():
        return torch.ops.te.linear_cross_entropy(*args, group, ranks)
    return _C.linear_cross_entropy(*args, group, ranks)
