"""The norm of all gradients, each parameter once, from the shards of the ranks; and the factor that clips and unscales.
Sums are float64; nothing is waited for on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.data_parallel.communicator import all_gather_object
from transformer_engine.pytorch.data_parallel.shards import Shard
from transformer_engine.pytorch.data_parallel.wrapper import DistributedDataParallel
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.functional import optimizer_l2norm

OP = "DistributedOptimizer"
_TINY = 1e-6  # beside the norm that is divided by, as torch.nn.utils.clip_grad_norm_ has it
_DENSE, _DENSE_DIVIDED, _EXPERT, _EXPERT_DIVIDED = range(4)


class GradNorm:
    """tp_group: over which parameters marked tensor_model_parallel are divided. stats_group: sums over all ranks in one
    collective, in place of those over data-parallel and tensor-parallel ranks."""

    def __init__(
        self, shards: Sequence[Shard], wrapper: DistributedDataParallel, tp_group: Any, stats_group: Any
    ) -> None:
        self.device = wrapper._groups[0].buckets[0].grad_data.device
        self.kinds: list[list[torch.Tensor]] = [[], [], [], []]
        for shard in shards:
            self.kinds[2 * shard.expert + shard.is_divided].append(shard.gradient)
        self.comm, self.expert_comm = wrapper._comm, wrapper._expert_comm
        self.is_sharded = wrapper.config.use_distributed_optimizer
        self.tp_group, self.tp_size = tp_group, 1 if tp_group is None else ranks_of(OP, "tp_group", tp_group)
        self.stats_group = stats_group
        if stats_group is not None:
            ranks_of(OP, "grad_stats_group", stats_group)
        self._flag = torch.zeros(1, dtype=torch.float32, device=self.device)  # of optimizer_l2norm, which is not read

    @torch.no_grad()
    def __call__(self, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm, float32, without a dimension; and flags, float64 >= 0, as sums over all ranks that step together,
        which travel with the norm."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for kind, gradients in enumerate(self.kinds):
            if gradients:
                norm, _ = optimizer_l2norm(gradients, noop=self._flag)
                torch.square(norm.double().squeeze(0), out=sums[kind])
        total, flags = (self._over_groups if self.stats_group is None else self._over_stats_group)(sums, flags)
        return total.sqrt().float(), flags

    def _copies(self) -> tuple[int, int]:
        """How many ranks of the data-parallel group hold the same sum: of dense parameters, of experts."""
        return (1, 1) if self.is_sharded else (self.comm.size, self.expert_comm.size)

    def _over_groups(self, sums: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copies = 1 if self.is_sharded else self.expert_comm.size
        first = 0 if self.is_sharded else _EXPERT if self.expert_comm is not self.comm else len(sums)
        over_ranks, count = flags, len(sums) - first
        if count:
            over_ranks = torch.cat([sums[first:] if copies == 1 else sums[first:] / copies, flags])
        self.comm.all_reduce(over_ranks).wait()
        if count:
            sums = torch.cat([sums[:first], over_ranks[:count]]) if first else over_ranks[:count]
        flags = over_ranks[count:]
        if self.tp_size == 1:
            return sums.view(2, 2).sum(0).sum(), flags  # (_DENSE + _EXPERT) + (the divided ones)
        copied, divided = sums.view(2, 2).sum(0)
        total = torch.cat([torch.add(divided, copied, alpha=0).view(1), flags])  # NaN where one rank's copy is
        dist.all_reduce(total, group=self.tp_group)
        return copied + total[0], total[1:]

    def _over_stats_group(self, sums: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dense, expert = self._copies()
        counts = 1 if self.tp_size == 1 or dist.get_rank(self.tp_group) == 0 else 0  # 0 keeps a NaN
        total = sums[_DENSE_DIVIDED] / dense + sums[_EXPERT_DIVIDED] / expert
        total = torch.add(total, sums[_DENSE] / dense, alpha=counts)
        total = torch.add(total, sums[_EXPERT] / expert, alpha=counts)
        total = torch.cat([total.view(1), flags])
        dist.all_reduce(total, group=self.stats_group)
        return total[0], total[1:]

    # Of errors that all of these ranks raise.

    def where(self) -> str:
        """This rank in words."""
        own = f"rank {self.comm.rank}"
        return own if self.tp_size == 1 else f"{own} (rank {dist.get_rank(self.tp_group)} of 'tp_group')"

    def all_gather_object(self, value: list[Any]) -> list[list[Any]]:
        """The list that each rank passes, on all of them. Waits on the host."""
        if self.stats_group is not None:
            return all_gather_object(value, self.stats_group)
        values = self.comm.all_gather_object(value)
        if self.tp_size == 1:
            return values
        return [one for each in all_gather_object(values, self.tp_group) for one in each]


def clip_factor(norm: torch.Tensor, clip: float, inv_scale: torch.Tensor | None) -> torch.Tensor | None:
    """The factor of the gradients: float32 [1] on the device, None for 1. norm: of the unscaled gradients."""
    factor = None if clip == 0.0 else (clip / (norm + _TINY)).clamp(max=1.0).view(1)
    if inv_scale is None:
        return factor
    return inv_scale if factor is None else factor * inv_scale
