"""Two linear products of rows in groups with an activation between them, the experts of a mixture, as one function.
Nothing is sorted or sent: the caller orders the rows by groups."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional.grouped_linear import listed
from transformer_engine.pytorch.functional.linear import TracedGradAccumulator, _spec, _traced

Accumulator = _C.GradAccumulator | TracedGradAccumulator | None
Quantizations = Sequence[_C.ProductQuantization] | list[int]


def grouped_mlp(
    x: torch.Tensor,
    offsets: torch.Tensor | None,
    weights1: Sequence[torch.Tensor] | torch.Tensor,
    weights2: Sequence[torch.Tensor] | torch.Tensor,
    row_scale: torch.Tensor | None = None,
    *,
    splits: Sequence[int] = (),
    row_map: tuple[torch.Tensor, torch.Tensor] | None = None,
    keep_rows: bool = False,
    sum_rows: bool = False,
    kind: str = "swiglu",
    params: Sequence[float] = (),
    keep_input: bool = False,
    fp8_pre_activation: bool = False,
    grad_accumulators: tuple[Accumulator, Accumulator] = (None, None),
    quantizations: tuple[Quantizations, Quantizations] = ((), ()),
    own_weights: tuple[Sequence[_C.Quantized], Sequence[_C.Quantized]] = ((), ()),
    zero_scale_tail: bool = True,
) -> torch.Tensor:
    """y[rows of g] = (act(x[rows of g] weights1[g]^T) * row_scale[rows of g]) weights2[g]^T, for consecutive groups of
    rows, as one autograd node: grouped_linear, scaled_activation, grouped_linear, to the same bits.

    offsets: the result of grouped_offsets(). x and row_scale are not read in rows of no group; y, and the gradients of
    both, are zero there. splits, with offsets None: the number of rows of each group, adding up to x's.
    row_map: the first two results of permute_row_map(), or the second and third of permute_routing(). x has a row for
    each token then, and the rows are gathered from it by the map, to the bits of permute() before this function. The
    gradients of a token's rows are added up in the order of the map. The backward gathers the rows again; keep_rows
    keeps them. sum_rows: y has the sum of each token's rows, as unpermute() after this function, to the same bits.
    zero_scale_tail: False where the gradient of row_scale is not read in rows of no group (the backward of
    router_rows() and that of permute_routing() do not): in eager mode it may be anything there, for a launch less.
    Shapes: x [rows, in_features], weights1 [hidden, in_features] each ([2 hidden, in_features] for a gated kind),
    weights2 [out_features, hidden] each, or one tensor of all as in grouped_linear, row_scale [rows]. Dtypes: as
    grouped_linear; row_scale float32 or x's dtype.
    kind, params: as activation. keep_input, grad_accumulators, quantizations, own_weights: as grouped_linear, of the
    first and the second product.
    Saves: x (with a map also the map; with keep_rows the rows in place of x), the pre-activation (rows of weights1's
    width), row_scale and the weights. The activation is computed again. fp8_pre_activation: the pre-activation as E4M3
    in blocks of 1 x 128; the backward computes the activation and its gradient from these values.
    Errors: ValueError naming the argument; NotImplementedError as grouped_linear.
    """
    weights1, weights2 = listed("grouped_mlp", "weights1", weights1), listed("grouped_mlp", "weights2", weights2)
    token_of_row, row_of_pair = row_map or (None, None)
    if row_map is not None and not keep_rows:
        keep_input = True
    options = (token_of_row, row_of_pair, sum_rows, kind, list(params), keep_input, fp8_pre_activation)
    if torch.compiler.is_compiling():
        integers = [_spec(one if isinstance(one, list) else None) for one in quantizations]
        arguments = (x, list(weights1), list(weights2), row_scale, offsets, list(splits), *options, *integers)
        leaves = [next((w for w in weights if w.requires_grad), weights[0]) for weights in (weights1, weights2)]
        products = zip(leaves, grad_accumulators, strict=True)
        return _traced("grouped_mlp", torch.ops.te.grouped_mlp, arguments, *products)
    handles = (grad_accumulators, quantizations, own_weights)
    return _C.grouped_mlp(x, weights1, weights2, row_scale, offsets, splits, *options, *handles, zero_scale_tail)
