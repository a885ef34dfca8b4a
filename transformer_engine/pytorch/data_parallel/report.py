"""The memory of a wrapper as a table: rows of parameters by bucket. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from transformer_engine.pytorch.data_parallel.buffers import ParamAndGradBuffer


class LayoutRow(NamedTuple):
    """Elements [start, end) of a buffer hold a parameter. shards: ranks that step a part of it, all if not sharded."""

    buffer: int
    bucket: int
    name: str
    start: int
    end: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    expert: bool
    shards: tuple[int, ...]


class LayoutReport(list):
    """LayoutRows in the order of the buffers."""

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        super().__init__()
        for number, buffer in enumerate(buffers):
            kind = buffer.param_dtype, buffer.grad_dtype, buffer.expert
            for bucket in buffer.buckets:
                for slot in bucket.layout.slots:
                    name = buffer.names[buffer.params[slot.param]]
                    shards = tuple(range(buffer.comm.size))
                    if buffer.param_data is not None:
                        shards = tuple(rank for rank in shards if _meets(bucket.layout.shard(rank, len(shards)), slot))
                    self.append(LayoutRow(number, bucket.bucket_id, name, slot.start, slot.end, *kind, shards))

    def __str__(self) -> str:
        lines = ["buffer bucket  start .. end  parameter  (weight, gradient)  ranks"]
        for row in self:
            kind = f"({_short(row.param_dtype)}, {_short(row.grad_dtype)}{', expert' if row.expert else ''})"
            lines.append(
                f"{row.buffer:>6} {row.bucket:>6}  {row.start} .. {row.end}  {row.name}  {kind}  {list(row.shards)}"
            )
        return "\n".join(lines)


def _meets(shard: tuple[int, int], slot: object) -> bool:
    return max(shard[0], slot.start) < min(shard[1], slot.end)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
