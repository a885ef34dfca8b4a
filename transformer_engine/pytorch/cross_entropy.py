"""Cross entropy of logits, which its gradient overwrites, and of a head's product whose logits are never all in memory
at once; the classes may be divided over a group's ranks. functional/cross_entropy.py computes."""

import re
import warnings

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch._internal.torch_private import current_graph_task_id
from transformer_engine.pytorch.distributed.groups import check_device, ranks_of
from transformer_engine.pytorch.distributed.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from transformer_engine.pytorch.quantization.recipes.products import stateless_integers
from transformer_engine.pytorch.quantization.state.autocast_state import current_state
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_OPS_WORDS = re.compile(r"^(te_|linear_)?cross_entropy(_\w+)?: ")


def _check_plain(op: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor)
        if isinstance(tensor, QuantizedTensorStorage):
            refuse(
                f"{op}: argument '{name}' is a {type(tensor).__name__}, and losses of quantized tensors are not "
                "available in this version; pass its dequantize()."
            )


def _group(op: str, group: dist.ProcessGroup | None, like: torch.Tensor) -> tuple[str, int]:
    """The name and ranks for the ops; None, and a group of one: this process has all classes."""
    ranks = 1 if group is None else ranks_of(op, "dist_process_group", group)
    if ranks == 1:
        return "", 1
    check_device(op, "dist_process_group", like, group)
    return group.group_name, ranks


def _check_numbers(op: str, label_smoothing: float, ignore_idx: int) -> None:
    if not isinstance(label_smoothing, (int, float)):
        raise ValueError(f"{op}: argument 'label_smoothing' is {label_smoothing!r}, wanted a number in [0, 1].")
    if type(ignore_idx) is not int and not hasattr(ignore_idx, "__index__"):
        raise ValueError(f"{op}: argument 'ignore_idx' is {ignore_idx!r}, wanted an integer.")


def _is_of_leaf(inp: torch.Tensor) -> bool:
    """Whether it is a view of a leaf that requires a gradient, which would be overwritten."""
    base = inp._base if inp._is_view() else None
    return base is not None and base.is_leaf and base.requires_grad


def _is_overwritten(logits: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and logits.requires_grad and not torch.compiler.is_compiling()


def _laid_out(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...] | None]:
    """Logits that are not contiguous, in a form for the ops: with their dimensions in the order of memory, which is
    returned too, if that suffices (transposed [s, b, V]); otherwise a copy, whose gradient overwrites nothing."""
    written = _is_overwritten(logits)
    if not torch.compiler.is_compiling() and target.shape == logits.shape[:-1]:
        order = sorted(range(logits.dim() - 1), key=logits.stride, reverse=True)
        seen = logits.permute(*order, -1)
        if seen.is_contiguous() and not (written and (logits.is_leaf or _is_of_leaf(logits))):
            return seen, target.permute(order), tuple(order)
    return logits.contiguous(), target, None


def _error_for_caller(op: str, logits: str, error: Exception) -> Exception:
    """An error of the ops in the words of the function that called them. logits: its name for the argument 'logits'."""
    text, found = _OPS_WORDS.subn(f"{op}: ", str(error), count=1)
    if not found:
        return error
    return type(error)(text.replace("'logits'", f"'{logits}'", 1))


@check_keywords(renamed={"_input": "inp"})
def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """loss = logsumexp(inp) - (1 - s) inp[target] - s / V sum(inp), s = label_smoothing, of each token, in float32.

    If inp requires a gradient, its memory holds that gradient afterwards: it must not be read as logits any more, a
    backward that saved it raises, and so does another loss of this memory. The gradient has memory of its own under
    torch.compile, and if inp is not contiguous (dimensions before the last that are only exchanged need no copy). A
    second backward through the loss (retain_graph) raises, and so does a double backward. For a view of logits read the
    gradient of its base: the view's own is lost.

    reduce_loss: the mean over the tokens whose target is not ignore_idx, as a scalar (NaN for none, as in
    torch.nn.functional.cross_entropy). With it and a gradient of 1 the backward touches no logits; without it those of
    tokens whose incoming gradient is not 1. float16 is scaled in any case.
    dist_process_group: inp has this rank's classes, equally many on every rank; targets are the same, global, on each.
    is_cg_capturable: without an effect: neither way waits for the device, so both can be captured.
    Shapes: inp [..., V]; target [...], int64; the loss like target.
    Dtypes: inp float32, float16 or bfloat16; float64 is rounded to float32 first.
    Errors: ValueError naming the argument; on the CPU also for a target that is neither ignore_idx nor in [0, V),
    before anything is written. On a GPU, where the host does not wait, such a token's loss and gradient are NaN.
    RuntimeError for a view of a leaf that requires a gradient, and for logits that a loss has already overwritten.
    """
    op = "parallel_cross_entropy"
    _check_plain(op, inp=inp, target=target)
    if type(label_smoothing) is not float or type(ignore_idx) is not int:
        _check_numbers(op, label_smoothing, ignore_idx)
    name, ranks = _group(op, dist_process_group, inp)
    logits, targets, order = inp, target, None
    if inp.dtype is torch.float64:
        logits = inp.float()
    if not logits.is_contiguous():
        logits, targets, order = _laid_out(logits, target)
    elif _is_overwritten(logits) and _is_of_leaf(logits):
        raise RuntimeError(
            f"{op}: argument 'inp' is a view of a leaf that requires a gradient, which would be overwritten; pass the "
            "leaf itself, or a clone()."
        )
    try:
        loss = functional.cross_entropy(
            logits,
            targets,
            label_smoothing=label_smoothing,
            reduce_loss=reduce_loss,
            ignore_idx=ignore_idx,
            group=name,
            ranks=ranks,
        )
    except (ValueError, RuntimeError) as error:
        raise _error_for_caller(op, "inp", error) from None
    if order is None or reduce_loss:
        return loss
    return loss.permute([order.index(d) for d in range(loss.dim())])


def _quantization(op: str) -> list[int]:
    """The te.autocast in force, as integers; empty: plain products."""
    state = current_state()
    if not state.enabled:
        return []
    recipe = state.chosen_recipe()
    if recipe.delayed() or recipe.custom():
        refuse(
            f"{op}: {type(recipe).__name__} keeps state between steps, which is not available in this version for a "
            "function without state; use Float8CurrentScaling or Float8BlockScaling, or te.autocast(enabled=False) "
            "around it."
        )
    if recipe.backward_override is not None:
        refuse(
            f"{op}: argument 'backward_override' of {type(recipe).__name__} is {recipe.backward_override!r}, but this "
            "function's backward in another precision than its forward is not available in this version; leave it at "
            "None, or use te.Linear and te.parallel_cross_entropy."
        )
    return stateless_integers(recipe)


# Weights whose last call, outside of any backward, had FP8 products.
_in_fp8 = WeakIdKeyDictionary()


def _note_precision(op: str, weight: torch.Tensor, fp8: bool) -> None:
    """Warns if a backward runs the function again without the te.autocast of its first run."""
    in_backward = current_graph_task_id() != -1
    if in_backward and not fp8 and torch.is_grad_enabled() and weight in _in_fp8:
        warnings.warn(
            f"{op}: it ran under te.autocast, and runs without it inside a backward, as torch.utils.checkpoint "
            "recomputes: its gradients are not those of the forward that ran; use te.checkpoint, which recomputes "
            "under the same autocast.",
            stacklevel=3,
        )
    if fp8:
        _in_fp8[weight] = True
    elif not in_backward:
        _in_fp8.pop(weight, None)


@check_keywords()
def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    reduce_loss: bool = True,
    ignore_idx: int = -100,
    dist_process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    weight_grad_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """parallel_cross_entropy(hidden weight^T + bias, target) without all logits: at most 512 MiB of them at a time.

    With reduce_loss the forward computes the gradients of hidden, weight and bias, those that are required; the
    backward multiplies them by the incoming gradient, unless that is 1, without waiting for the device, and runs once.
    Without reduce_loss the backward recomputes the logits, with each token's incoming gradient.

    weight_grad_dtype: the dtype in which the chunks' parts of the weight's gradient are added up: float32, or weight's
    dtype, in half the memory and with a rounding for each chunk (float16 may overflow). The bias's are added up in
    float32. docs/guide/cross_entropy.md has the memory and time of each.
    dist_process_group: weight and bias are this rank's classes, equally many on every rank; hidden and target are the
    same on each, and hidden's gradient is added up. sequence_parallel: hidden is this rank's part of dimension 0, which
    is gathered, and its gradient is added up and scattered; target is not divided.
    Under te.autocast the three products are FP8, each chunk quantized by itself; current and block scaling.
    Shapes: hidden [..., features], weight [V, features], bias [V], target [...], int64; the loss a scalar, or like
    target. Dtypes: float32, float16 or bfloat16, one for all (torch.autocast casts); the loss float32.
    Errors: as parallel_cross_entropy; NotImplementedError for recipes with state and for quantized tensors.
    """
    op = "fused_linear_cross_entropy"
    given = {} if bias is None else {"bias": bias}
    _check_plain(op, hidden=hidden, weight=weight, target=target, **given)
    if type(label_smoothing) is not float or type(ignore_idx) is not int:
        _check_numbers(op, label_smoothing, ignore_idx)
    if weight_grad_dtype not in (torch.float32, weight.dtype):
        raise ValueError(
            f"{op}: argument 'weight_grad_dtype' is {weight_grad_dtype}, wanted torch.float32 or the weight's "
            f"{weight.dtype}."
        )
    name, ranks = _group(op, dist_process_group, hidden)
    if ranks > 1:  # each rank's classes give a part of hidden's gradient
        enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        hidden = enter(hidden, dist_process_group)
    quantization = _quantization(op)
    if not torch.compiler.is_compiling():
        _note_precision(op, weight, bool(quantization))
    try:
        return functional.fused_linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            label_smoothing=label_smoothing,
            reduce_loss=reduce_loss,
            ignore_idx=ignore_idx,
            float32_sum=weight_grad_dtype is torch.float32,
            quantization=quantization,
            group=name,
            ranks=ranks,
        )
    except (ValueError, RuntimeError) as error:
        raise _error_for_caller(op, "logits", error) from None
