"""The heads of a projection: the columns of each. Nothing is copied or computed."""

import torch


def split_heads(
    projected: torch.Tensor, heads: tuple[int, ...], head_dim: int, groups: int
) -> tuple[torch.Tensor, ...]:
    """The parts of a projection, [..., n * head_dim] -> [..., n_i, head_dim] for each n_i of `heads`; within each of
    `groups` they are consecutive."""
    if groups == 1:
        return tuple(p.unflatten(-1, (-1, head_dim)) for p in projected.split([n * head_dim for n in heads], dim=-1))
    grouped = projected.unflatten(-1, (groups, sum(heads) // groups, head_dim))
    return tuple(part.flatten(-3, -2) for part in grouped.split([n // groups for n in heads], dim=-2))
