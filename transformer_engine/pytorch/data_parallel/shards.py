"""The shards that one rank steps: of each parameter the elements in this rank's part of its bucket, or all of them
where buckets are not cut. Weights and gradients are views of the wrapper's buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.data_parallel import fp8_weights
from transformer_engine.pytorch.data_parallel.groups import BucketGroup
from transformer_engine.pytorch.data_parallel.wrapper import DistributedDataParallel
from transformer_engine.pytorch.distributed.sharded_state import divisions_of

OP = "DistributedOptimizer"


class Shard(NamedTuple):
    """Elements [start, end) of the flattened parameter. weight, gradient: views; of the parameter's own shape where it
    is whole. The weight of one that is held in FP8 is its master, in memory of its own."""

    param: torch.nn.Parameter
    group: BucketGroup
    start: int
    end: int
    weight: torch.Tensor
    gradient: torch.Tensor
    expert: bool
    is_divided: bool  # over tensor-parallel ranks
    is_fp8: bool


def bucket_groups_of(wrappers: Iterable[DistributedDataParallel]) -> dict[torch.nn.Parameter, BucketGroup]:
    return {p: group for wrapper in wrappers for p, group in wrapper.param_to_bucket_group.items()}


def shards_of(
    param_groups: Sequence[Mapping[str, Any]], wrappers: Sequence[DistributedDataParallel]
) -> list[list[Shard]]:
    """Of each parameter group the shards of this rank; frozen parameters of a wrapped module have none. ValueError for
    other parameters that no wrapper holds."""
    group_of = bucket_groups_of(wrappers)
    divided = {p for wrapper in wrappers for p in divisions_of(wrapper.module)}
    frozen = {p for wrapper in wrappers for p in wrapper.module.parameters() if not p.requires_grad}
    found = []
    for number, param_group in enumerate(param_groups):
        unknown = [tuple(p.shape) for p in param_group["params"] if p not in group_of and p not in frozen]
        if unknown:
            raise ValueError(
                f"{OP}: group {number} has {len(unknown)} parameters that no DistributedDataParallel among 'ddps' "
                f"holds, the first of shape {unknown[0]}; make the optimizer of the parameters of the wrapped module."
            )
        made = (_shard(p, group_of[p], p in divided) for p in param_group["params"] if p in group_of)
        found.append([shard for shard in made if shard is not None])
        for p in param_group["params"]:
            if p in group_of and fp8_weights.is_fp8(p):
                fp8_weights.clear_first_values(p)
    return found


def _shard(param: torch.nn.Parameter, group: BucketGroup, is_divided: bool) -> Shard | None:
    bucket = group.param_to_bucket[param]
    begin, end = bucket.buffer.where(param)
    fp8 = fp8_weights.is_fp8(param)
    rest = bucket.buffer.expert, is_divided, fp8
    if not group.is_sharded:
        values = fp8_weights.first_values(param, 0, param.numel()) if fp8 else param.detach()
        return Shard(param, group, 0, param.numel(), values, param.main_grad, *rest)
    comm = bucket.buffer.comm
    first, last = bucket.layout.shard(comm.rank, comm.size)
    first, last = max(first, begin), min(last, end)
    if first >= last:
        return None
    start, end, gradient = first - begin, last - begin, bucket.buffer.grad_data[first:last]
    weight = bucket.buffer.param_data[first:last]
    if fp8:
        weight = fp8_weights.first_values(param, start, end).view(-1)
    return Shard(param, group, start, end, weight, gradient, *rest)


def groups_in_gather_order(wrappers: Iterable[DistributedDataParallel]) -> list[BucketGroup]:
    return [group for wrapper in wrappers for chain in wrapper._chains for group in chain.groups]
