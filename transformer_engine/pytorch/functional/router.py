"""The MoE router as functions: the choice of each token's experts, the scores of the auxiliary loss, and that loss.
Formulas: transformer_engine/router.h."""

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional.permute import permute_routing

MAX_EXPERTS, MAX_TOPK = 1024, 32  # TE_ROUTER_MAX_EXPERTS, TE_ROUTER_MAX_TOPK


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T in float32, of operands in their own dtype (in float32 if these differ). The gradients are products in
    float32, rounded once. x [tokens, hidden], weight [experts, hidden]. Saves: both."""
    if torch.compiler.is_compiling():
        return torch.ops.te.router_logits(x, weight)
    return _C.router_logits(x, weight)


def router_topk(
    logits: torch.Tensor,
    topk: int,
    *,
    pre_softmax: bool = False,
    num_groups: int = 0,
    group_topk: int = 0,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    map_format: str = "bytes",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probs, map, chosen): probabilities of each token's topk experts, 0 for all others; which experts they are; and
    the same as a list, the best one first.

    Shapes: logits, probs [..., experts]; expert_bias [experts]; map bool [..., experts] ("bytes"), uint8
    [..., ceil(experts / 8)] with the lowest bit first ("bits"), or empty ("none"); chosen [..., topk].
    Dtypes: logits float32, float16 or bfloat16, probs the same; expert_bias any of these; chosen int32. Arithmetic in
    float32, one rounding.
    Saves: logits and chosen. Gradients: of logits alone.
    Errors: ValueError naming the argument.
    """
    args = (
        logits,
        expert_bias,
        topk,
        pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        map_format,
    )
    if torch.compiler.is_compiling():
        return torch.ops.te.router_topk(*args)
    return _C.router_topk(*args)


def router_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk: int,
    experts: tuple[int, int],
    rows: int,
    *,
    pre_softmax: bool = False,
    num_groups: int = 0,
    group_topk: int = 0,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    count: bool = True,
    counts: torch.Tensor | None = None,
    with_logits: bool = False,
    zero: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """router_logits(), router_topk() of the logits, and permute_routing() of the choice, to their bits: (x,
    probabilities of the rows, token of each row, rows of each token, offsets, tokens of every expert, logits or None).
    In eager mode they are one autograd node.

    The first result is x for its other readers: in eager mode the gradient that arrives there is added to the router's
    before both reach x. Arguments: those of the three functions; with_logits: the logits are returned, and may have a
    gradient. zero: one float32 on x's device that is set to 0, for a caller that would launch a kernel for it.
    Saves: x, weight, logits, the chosen experts and the rows of each token."""
    choice = (topk, pre_softmax, num_groups, group_topk, scaling_factor, score_function)
    if not torch.compiler.is_compiling():
        return _C.router_rows(x, weight, expert_bias, *choice, *experts, rows, count, counts, with_logits, zero)
    x = x.view(x.shape)
    logits = router_logits(x, weight)
    probs, _, chosen = torch.ops.te.router_topk(logits, expert_bias, *choice, "none")
    routed = permute_routing(probs, chosen, experts, rows, count=count, counts=counts)
    if zero is not None:
        zero.zero_()
    return (x, *routed, logits if with_logits else None)


def router_scores(
    logits: torch.Tensor, topk: int, *, score_function: str = "softmax", map_format: str = "bytes"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, map): scores of all experts that add up to 1, and the map of the topk largest.

    Shapes and dtypes as in `router_topk`, but scores are float32. Saves: logits.
    """
    args = (logits, topk, score_function, map_format)
    if torch.compiler.is_compiling():
        return torch.ops.te.router_scores(*args)
    return _C.router_scores(*args)


def router_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    *,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The load-balancing loss: sum over experts of tokens_per_expert times the sum of their probs over tokens, times
    num_experts * coeff / (topk * total_num_tokens^2); 0 if there are no tokens.

    Shapes: probs [..., columns], columns a multiple of num_experts; tokens_per_expert [columns], int32, int64, float32
    or bfloat16. total_num_tokens: an int, or one int64 on the device of probs, which is read there without a host
    synchronisation. Returns a scalar of probs' dtype; sums are float32, in a fixed order.
    Saves: tokens_per_expert, and total_num_tokens if it is a tensor. Gradients: of probs alone.
    """
    is_tensor = isinstance(total_num_tokens, torch.Tensor)
    total = (total_num_tokens, 0) if is_tensor else (None, total_num_tokens)
    args = (probs, tokens_per_expert, *total, num_experts, topk, coeff)
    if torch.compiler.is_compiling():
        return torch.ops.te.router_aux_loss(*args)
    return _C.router_aux_loss(*args)
