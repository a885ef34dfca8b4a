# Shared by the suites of the router: logits, plain oracles in float64 and their bounds. No test is here.
import torch
from support import U32, rounding

SCORES = ("softmax", "pre_softmax", "sigmoid", "sqrtsoftplus")


def draw_logits(device, *shape, dtype=torch.float32, seed=0):
    """Multiples of 1/64: differences of scores are far above roundings, so that rounding does not change the
    choice; equal logits are frequent, and have equal scores."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(shape, generator=generator) * 96).round() / 64).to(dtype).to(device)


def scores_of(x, score):
    """Scores of a logit alone; of float64."""
    return torch.sigmoid(x) if score == "sigmoid" else torch.nn.functional.softplus(x).sqrt()


def first(values, count):
    """Indices of the largest values, in order, of equal ones the lower index."""
    return values.sort(dim=-1, stable=True, descending=True).indices[..., :count]


def choice(values, topk, num_groups=None, group_topk=None):
    if group_topk is not None:
        groups = values.unflatten(-1, (num_groups, -1))
        sums = groups.sort(dim=-1, descending=True).values[..., : topk // group_topk].sum(-1)
        stays = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, first(sums, group_topk), True)
        values = groups.masked_fill(~stays[..., None], -torch.inf).flatten(-2)
    return first(values, topk)


def topk_oracle(logits, topk, score, num_groups=None, group_topk=None, scaling_factor=None, expert_bias=None):
    """(probs, chosen) of float64 logits, differentiable."""
    x = logits
    if score == "softmax":
        chosen = choice(x, topk, num_groups, group_topk)
        weights = x.gather(-1, chosen).softmax(-1)
    elif score == "pre_softmax":
        s = x.softmax(-1)
        chosen = choice(s, topk, num_groups, group_topk)
        weights = s.gather(-1, chosen)
    else:
        s = scores_of(x, score)
        chosen = choice(s if expert_bias is None else s + expert_bias.double(), topk, num_groups, group_topk)
        weights = s.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if topk > 1 else weights
    weights = weights * (1.0 if scaling_factor is None else scaling_factor)
    return torch.zeros_like(x).scatter(-1, chosen, weights), chosen


def scores_oracle(logits, score):
    """Scores for the auxiliary loss, of float64 logits."""
    if score == "softmax":
        return logits.softmax(-1)
    s = scores_of(logits, score)
    return s / (s.sum(-1, keepdim=True) + 1e-20)


def loss_oracle(probs, tokens, total, num_experts, topk, coeff):
    return (probs.double().flatten(0, -2).sum(0) * tokens.double()).sum() * num_experts * coeff / (topk * total**2)


def share_error(logits):
    """Relative error of a share of a sum. exp is within 2 u, and its argument, a difference d, rounds by |d| u; sigmoid
    and sqrt(softplus) are within 6 u. A sum in 32 lanes takes E / 32 + 5 additions, whose terms have that error too.
    Then a division and a product."""
    spread = (logits.max() - logits.min()).item() if logits.numel() else 0.0
    return (2 * spread + logits.size(-1) / 32 + 19) * U32


def gradient_bound(logits, shares, incoming, factor):
    """factor (incoming - sum of incoming * shares), factor the share itself (softmax) or slope / sum: each of its
    operands has the error of a share, the slope 10 u, the sum's additions as in share_error."""
    size = incoming.abs() + (incoming * shares).abs().sum(-1, keepdim=True)
    return factor.abs() * size * (4 * share_error(logits) + 20 * U32)


def stored(values, relative, dtype):
    """The bound of values of that relative error in float32, rounded once to dtype."""
    before = values.abs() * relative + 1e-37
    return before + rounding(values.abs() + before, dtype)
