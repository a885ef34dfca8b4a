"""Which parameter's local gradient is not finite: its norm, taken before the collective spreads it to all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch.data_parallel.buffers import OP, Bucket
from transformer_engine.pytorch.functional import optimizer_l2norm


class NanCheck:
    """Of a group's buckets. flag: 1 on the device where a norm of the last measurement is not finite."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.flag = torch.zeros(1, dtype=torch.float32, device=self.buckets[0].grad_data.device)
        self.norms: list[torch.Tensor] = []

    @torch.no_grad()
    def measure(self) -> None:
        """One launch a bucket; nothing is waited for."""
        self.flag.zero_()
        self.norms = []
        for bucket in self.buckets:
            _, norms = optimizer_l2norm([p.main_grad for p in bucket.params_list], noop=self.flag, per_tensor=True)
            self.norms.append(norms)

    def clear(self) -> None:
        self.flag.zero_()
        self.norms = []


class NanReport:
    """The norms of one step, which later measurements leave alone. flag: > 0 on the device where one of any rank is not
    finite. where: this rank in words. gather: what every rank brings, in the same order on each of them. was_raised:
    this rank has raised an error for this step before."""

    def __init__(
        self,
        checks: Sequence[NanCheck],
        flag: torch.Tensor,
        where: str,
        gather: Callable[[Any], list[Any]],
        was_raised: bool = False,
    ) -> None:
        self.flag, self.where, self.gather, self.was_raised = flag, where, gather, was_raised
        self.measured = [pair for check in checks for pair in zip(check.buckets, check.norms)]
        self.is_open = True

    def found(self) -> list[tuple[str, int, str]]:
        """(rank, bucket, parameter) of each norm of this rank that is not finite. Waits on the host."""
        return [
            (self.where, bucket.bucket_id, bucket.buffer.names[param])
            for bucket, norms in self.measured
            for param, norm in zip(bucket.params_list, norms.tolist())
            if not math.isfinite(norm)
        ]

    def raise_once(self) -> None:
        """RuntimeError on all ranks where the flag is set. Waits on the host."""
        is_open, self.is_open = self.is_open, False
        if not is_open or not float(self.flag):
            return
        found = self.gather(self.found())
        if self.was_raised:
            return
        where, bucket, name = next(place for places in found for place in places)
        raise RuntimeError(
            f"{OP}: the gradient of parameter '{name}' in bucket {bucket} of {where} is not finite before it is "
            "reduced; lower the loss scale or the learning rate."
        )
