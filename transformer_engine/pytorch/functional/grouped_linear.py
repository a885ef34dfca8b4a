"""Linear products of rows in groups, a weight for each group, as functions. Nothing is sorted or sent: the caller
orders the rows by groups."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch.functional.linear import TracedGradAccumulator, _spec, _traced


def grouped_offsets(splits: torch.Tensor, x: torch.Tensor, *, count: bool = True) -> torch.Tensor:
    """The start of each group's rows of x: int32 [groups + 1], computed on the device without a sync.

    splits: int32 or int64 [groups] on x's device. A negative one counts as 0, and rows that x does not have are cut;
    te.verdict.split_verdict() counts both; not with count=False, for splits that an earlier call has counted. Errors:
    ValueError for another dtype, shape or device.
    """
    if torch.compiler.is_compiling():
        return torch.ops.te.grouped_offsets(splits, x, count)
    return _C.grouped_offsets(splits, x, count)


def listed(op: str, argument: str, weights: Sequence[torch.Tensor] | torch.Tensor) -> Sequence[torch.Tensor]:
    """Weights as the ops take them: a matrix for each group, or one stacked tensor [groups, out_features, in_features]
    alone, which stands for its matrices. The ops check the rest."""
    if not isinstance(weights, torch.Tensor):
        return weights
    if weights.dim() != 3:
        raise ValueError(
            f"{op}: argument '{argument}' is one tensor {list(weights.shape)}, wanted [groups, out_features, "
            "in_features], or a list with a matrix for each group."
        )
    return (weights,)


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor] | torch.Tensor,
    biases: Sequence[torch.Tensor] = (),
    *,
    splits: Sequence[int] = (),
    offsets: torch.Tensor | None = None,
    grad_accumulator: _C.GradAccumulator | TracedGradAccumulator | None = None,
    quantizations: Sequence[_C.ProductQuantization] | list[int] = (),
    own_weights: Sequence[_C.Quantized] = (),
    keep_input: bool = False,
    out: torch.Tensor | None = None,
    dgrad_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[rows of g] = x[rows of g] weights[g]^T + biases[g], for consecutive groups of rows.

    splits: the number of rows of each group, adding up to x's. offsets, instead: the result of grouped_offsets(); rows
    of no group then give zeros, and get a gradient of zeros. out, dgrad_out: matrices that y and x's gradient are
    written into; rows of no group keep their values. Each group's bits are those of linear() of its rows alone (on
    CUDA, with offsets, if cuBLASLt does not split the reduction; biases' gradients are summed in an order of their
    own; with a scale for each group, FP8 sums of offsets and of splits of small groups restart every 128 products).
    Shapes: x [..., in_features], its leading dimensions folded into rows; weights [out_features, in_features] each, or
    one contiguous tensor [groups, out_features, in_features]: one input of the graph with one gradient and one
    main_grad, to the bits of the list of its matrices. Dtypes: as linear. quantizations: one for all groups, or one
    each (under torch.compile its integers). own_weights: FP8 copies of the weights. keep_input: as linear.
    Errors: ValueError naming the argument; with offsets on CUDA NotImplementedError for float32, and for quantizations
    that differ from group to group in more than their state, or are written in Python.
    """
    weights = listed("grouped_linear", "weights", weights)
    if torch.compiler.is_compiling():
        if out is not None or dgrad_out is not None:
            refuse(
                "grouped_linear: arguments 'out' and 'dgrad_out', memory of the caller for results, are not available "
                "in this version under torch.compile; leave them at None."
            )
        integers = _spec(quantizations if isinstance(quantizations, list) else None)
        arguments = (x, list(weights), list(biases), offsets, list(splits), keep_input, integers)
        leaf = next((weight for weight in weights if weight.requires_grad), weights[0])
        return _traced("grouped_linear", torch.ops.te.grouped_linear, arguments, (leaf, grad_accumulator))
    return _C.grouped_linear(
        x, weights, biases, offsets, splits, keep_input, grad_accumulator, quantizations, own_weights, out, dgrad_out
    )
