"""Which parameter's local gradient is not finite: its norm, taken before the collective spreads it to all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from transformer_engine.pytorch.data_parallel.buffers import Bucket
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

    def found(self) -> list[tuple[int, str]]:
        """(bucket, parameter) of each norm that is not finite. Waits on the host."""
        result = []
        for bucket, norms in zip(self.buckets, self.norms):
            for param, norm in zip(bucket.params_list, norms.tolist()):
                if not math.isfinite(norm):
                    result.append((bucket.bucket_id, bucket.buffer.names[param]))
        return result
