"""The heads of a projection: which of its columns are whose. Nothing is copied or computed."""

import torch


def split_heads(
    projected: torch.Tensor, heads: tuple[int, ...], head_dim: int, groups: int
) -> tuple[torch.Tensor, ...]:
    """The parts of a projection, [..., n * head_dim] -> [..., n_i, head_dim] for each n_i of `heads`; they lie one
    behind the other in each of `groups`."""
    if groups == 1:
        return tuple(p.unflatten(-1, (-1, head_dim)) for p in projected.split([n * head_dim for n in heads], dim=-1))
    grouped = projected.unflatten(-1, (groups, sum(heads) // groups, head_dim))
    return tuple(part.flatten(-3, -2) for part in grouped.split([n // groups for n in heads], dim=-2))
