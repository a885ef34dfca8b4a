"""The MoE router's fused functions: the names that clients import. Not available in this version."""

from enum import Enum

import torch

from transformer_engine.pytorch._internal.absent import absent

_ROUTER = "the fused MoE router is"
_TORCH = "compute it with torch's own softmax and topk"


class RoutingMapFormat(Enum):
    """How a routing map is stored: a byte for each expert, or a bit."""

    BYTEMAP = 0
    BITMAP_U8 = 1


@absent(_ROUTER, _TORCH)
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
    qb_histogram_mode: object | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and the routing map of each token's topk experts."""


@absent(_ROUTER, _TORCH)
def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: RoutingMapFormat = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing map and the scores for the auxiliary loss."""


@absent(_ROUTER, _TORCH)
def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The load-balancing loss."""
