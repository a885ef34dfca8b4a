"""The MoE router's fused functions, with the names and arguments that clients call."""

from enum import Enum

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_integer, check_number, check_tensor

_INDEX_DTYPES = (torch.int16, torch.int32, torch.int64)


class RoutingMapFormat(Enum):
    """How a routing map is stored: a byte for each expert, or a bit, the lowest one first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


class QBHistogramMode(Enum):
    """A name for imports: histograms (arguments `qb_*`) are not available in this version."""


_MAP_FORMATS = {RoutingMapFormat.BYTEMAP: "bytes", RoutingMapFormat.BITMAP_U8: "bits"}


def _map_format(op: str, given: RoutingMapFormat) -> str:
    if given not in _MAP_FORMATS:
        raise ValueError(
            f"{op}: argument 'routing_map_format' is {given!r}, wanted RoutingMapFormat.BYTEMAP or "
            "RoutingMapFormat.BITMAP_U8."
        )
    return _MAP_FORMATS[given]


def _check_kinds(
    op: str, tensors: dict[str, object], integers: dict[str, object], numbers: dict[str, object], score: object = ""
) -> None:
    """The types of arguments. A tracer has checks of its own."""
    if torch.compiler.is_compiling():
        return
    for check, group in ((check_tensor, tensors), (check_integer, integers), (check_number, numbers)):
        for name, value in group.items():
            check(op, name, value)
    if not isinstance(score, str):
        raise ValueError(
            f"{op}: argument 'score_function' is {score!r:.100}, wanted 'softmax', 'sigmoid' or 'sqrtsoftplus'."
        )


def _given(**arguments: object) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if value is not None}


def _renamed(error: ValueError, inner: str, op: str) -> ValueError:
    """The error of an inner op under the name of the function that was called."""
    return ValueError(str(error).replace(f"{inner}:", f"{op}:", 1))


def _check_indices(op: str, indices: torch.Tensor, chosen: torch.Tensor) -> None:
    if indices.dtype not in _INDEX_DTYPES or indices.shape != chosen.shape or indices.device != chosen.device:
        raise ValueError(
            f"{op}: argument 'topk_indices' is {indices.dtype} of shape {tuple(indices.shape)} on {indices.device}, "
            f"wanted int16, int32 or int64 of shape {tuple(chosen.shape)} on {chosen.device}."
        )


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: QBHistogramMode | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of each token's topk experts, in logits' dtype and shape, 0 for all others; and the routing map.

    score_function: "softmax" (of all logits before the choice with use_pre_softmax, else of the chosen ones),
    "sigmoid", "sqrtsoftplus" (these two divided by their sum if topk > 1). expert_bias counts in the choice alone, not
    with softmax. group_topk: the choice is among the experts of that many of num_groups groups, those with the largest
    sums of their topk / group_topk best; None: among all. scaling_factor multiplies the probabilities; None is 1. Of
    equal scores the lower index is chosen.
    The map: bool [..., experts], or uint8 [..., ceil(experts / 8)] with BITMAP_U8. With topk_indices (int16, int32 or
    int64 [..., topk]) there is no map: they are filled with the chosen experts, the best one first, and returned.
    Errors: ValueError naming the argument; NotImplementedError for qb_histogram, qb_bin_bounds, qb_histogram_mode.
    """
    op = "fused_topk_with_score_function"
    for name, given in (
        ("qb_histogram", qb_histogram),
        ("qb_bin_bounds", qb_bin_bounds),
        ("qb_histogram_mode", qb_histogram_mode),
    ):
        if given is not None:
            raise NotImplementedError(f"{op}: argument '{name}' is not available in this version; pass None.")
    _check_kinds(
        op,
        {"logits": logits} | _given(expert_bias=expert_bias, topk_indices=topk_indices),
        {"topk": topk} | _given(num_groups=num_groups, group_topk=group_topk),
        _given(scaling_factor=scaling_factor),
        score_function,
    )
    map_format = _map_format(op, routing_map_format)
    if topk_indices is not None:
        if routing_map_format is not RoutingMapFormat.BYTEMAP:
            raise ValueError(
                f"{op}: argument 'routing_map_format' is {routing_map_format}, wanted the default with topk_indices, "
                "which are returned in place of a map."
            )
        map_format = "none"
    if group_topk is not None and num_groups is None:
        raise ValueError(
            f"{op}: argument 'num_groups' is None, wanted the number of groups of which group_topk = {group_topk} stay."
        )
    grouped = group_topk is not None
    try:
        probs, routing_map, chosen = functional.router_topk(
            logits,
            topk,
            pre_softmax=bool(use_pre_softmax),
            num_groups=num_groups if grouped else 0,
            group_topk=group_topk if grouped else 0,
            scaling_factor=1.0 if scaling_factor is None else scaling_factor,
            score_function=score_function,
            expert_bias=expert_bias,
            map_format=map_format,
        )
    except ValueError as error:
        raise _renamed(error, "router_topk", op) from None
    if topk_indices is None:
        return probs, routing_map
    _check_indices(op, topk_indices, chosen)
    return probs, topk_indices.copy_(chosen)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map of the topk largest scores, and the scores: float32, softmax of the logits, or sigmoid or
    sqrtsoftplus over their sum. The map's formats are those of `fused_topk_with_score_function`."""
    op = "fused_compute_score_for_moe_aux_loss"
    _check_kinds(op, {"logits": logits}, {"topk": topk}, {}, score_function)
    options = {"score_function": score_function, "map_format": _map_format(op, routing_map_format)}
    try:
        scores, routing_map = functional.router_scores(logits, topk, **options)
    except ValueError as error:
        raise _renamed(error, "router_scores", op) from None
    return routing_map, scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The load-balancing loss: sum over experts of tokens_per_expert times the sum of their probs over tokens, times
    num_experts * coeff / (topk * total_num_tokens^2), in probs' dtype; 0 if there are no tokens. total_num_tokens: an
    int, or one int64 on probs' device, which is read there."""
    op = "fused_moe_aux_loss"
    total = {} if isinstance(total_num_tokens, torch.Tensor) else {"total_num_tokens": total_num_tokens}
    tensors = {"probs": probs, "tokens_per_expert": tokens_per_expert}
    _check_kinds(op, tensors, {"num_experts": num_experts, "topk": topk, **total}, {"coeff": coeff})
    try:
        return functional.router_aux_loss(
            probs, tokens_per_expert, total_num_tokens, num_experts=num_experts, topk=topk, coeff=coeff
        )
    except ValueError as error:
        raise _renamed(error, "router_aux_loss", op) from None
