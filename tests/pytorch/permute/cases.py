# Shared by the suites of permute: routings, and oracles in plain PyTorch, in float64. No test is here.
import torch
from support import DTYPES, randn, rounding, sum_error

__all__ = ["DTYPES", "randn"]


def mask_of(tokens, experts, topk, device="cpu", skew=False):
    """[T, E] bool, topk experts of each token; skew: expert 0 is in all, the last one in none."""
    scores = torch.rand(tokens, experts)
    if skew and experts > topk:
        scores[:, 0], scores[:, -1] = 2, -1
    mask = torch.zeros(tokens, experts, dtype=torch.bool)
    mask.scatter_(1, scores.topk(topk, dim=1).indices, True)
    return mask.to(device)


def ids_of(tokens, experts, topk, device="cpu"):
    """[T, k] int32, in no order."""
    return torch.rand(tokens, experts).topk(topk, dim=1).indices.int().to(device)


def probs_of(mask, dtype=torch.float32, requires_grad=False):
    """[T, E], positive where the mask is, else noise that must not be read."""
    return (torch.rand(mask.shape) + 0.25).to(mask.device, dtype).requires_grad_(requires_grad)


def pairs_of_mask(mask):
    """(token, expert) of each row."""
    expert, token = mask.cpu().t().nonzero(as_tuple=True)
    return token, expert


def pairs_of_ids(ids):
    """(token, place among the token's pairs) of each row."""
    flat = ids.cpu().flatten().long()
    order = flat.argsort(stable=True)
    return order // ids.shape[1], order % ids.shape[1]


def rows_oracle(inp, token, rows):
    """The tokens of the first `rows` pairs, then rows of 0; differentiable."""
    out = inp.index_select(0, token[:rows].to(inp.device))
    return torch.cat((out, out.new_zeros(rows - out.shape[0], inp.shape[1])))


def tokens_oracle(rows, token, weights, tokens):
    """The sum of each token's rows times their weights [pairs]; pairs past the rows are left out; differentiable."""
    n = min(rows.shape[0], token.shape[0])
    out = rows.new_zeros(tokens, rows.shape[1])
    return out.index_add(0, token[:n].to(rows.device), rows[:n] * weights[:n, None])


def sum_bound(rows, token, weights, tokens, topk, dtype):
    """topk fused multiply-adds in float32, and one rounding."""
    magnitude = tokens_oracle(rows.abs(), token, weights.abs(), tokens)
    return sum_error(magnitude, topk) + rounding(magnitude * (1 + topk * 2.0**-24), dtype)
