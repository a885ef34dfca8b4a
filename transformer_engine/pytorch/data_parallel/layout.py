"""The places of parameters and gradients in contiguous buffers, and which of them form a bucket. Pure: sizes, dtypes
and marks in, numbers out; no tensor is made here.

- Parameters come in reverse order of registration, each once; a buffer holds one (parameter dtype, gradient dtype,
  expert).
- No parameter is split. A bucket closes behind the parameter with which its size reaches bucket_size.
- Sharded: starts are multiples of 64 elements, ends of buckets multiples of lcm(ranks, 128), so that each rank has an
  equal slice. Unsharded: no padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ALIGN = 64  # elements at which a parameter starts, where buckets are cut into shards
_BUCKET_ALIGN = 128
_BUSBW_ALIGN = 1 << 16
_LEAST_BUCKET = 40_000_000
_BUCKET_OF_A_RANK = 1_000_000


class ParamSpec(NamedTuple):
    """The properties of a parameter that decide its place. unit: (number, place) of parameters that one product reads
    as one."""

    name: str
    numel: int
    param_dtype: torch.dtype  # torch.uint8 for FP8 weights
    grad_dtype: torch.dtype
    expert: bool = False
    shared: bool = False
    unit: tuple[int, int] | None = None


class Slot(NamedTuple):
    """A parameter's elements in its buffer. param: its number in the order of registration."""

    param: int
    start: int
    end: int


class BucketLayout(NamedTuple):
    """Elements [start, end) of a buffer; numel_unpadded lacks the padding at the end."""

    start: int
    end: int
    numel_unpadded: int
    slots: tuple[Slot, ...]

    def shard(self, rank: int, ranks: int) -> tuple[int, int]:
        """The elements of the buffer that rank steps."""
        size = (self.end - self.start) // ranks
        return self.start + rank * size, self.start + (rank + 1) * size


class BufferLayout(NamedTuple):
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    expert: bool
    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1].end

    @property
    def numel_unpadded(self) -> int:
        return sum(bucket.numel_unpadded for bucket in self.buckets)

    @property
    def slots(self) -> Iterator[Slot]:
        return (slot for bucket in self.buckets for slot in bucket.slots)


def default_bucket_size(ranks: int) -> int:
    """So large that a collective over so many ranks is bound by bandwidth."""
    return max(_LEAST_BUCKET, _BUCKET_OF_A_RANK * ranks)


def buffer_layouts(
    specs: Sequence[ParamSpec],
    *,
    sharded: bool,
    ranks: int,
    expert_ranks: int,
    bucket_size: int | None = None,
    num_buckets: int | None = None,
    one_bucket: bool = False,
    high_busbw: bool = False,
) -> list[BufferLayout]:
    """A layout for each (parameter dtype, gradient dtype, expert), in the order in which they are met."""
    kinds: dict[tuple, list[list[int]]] = {}
    for block in _blocks(specs):
        first = specs[block[0]]
        kinds.setdefault((first.param_dtype, first.grad_dtype, first.expert), []).append(block)
    layouts = []
    for (param_dtype, grad_dtype, expert), blocks in kinds.items():
        size = None if one_bucket else _bucket_size(specs, blocks, bucket_size, num_buckets, ranks)
        end_align = 1
        if sharded:
            end_align = math.lcm(expert_ranks if expert else ranks, _BUCKET_ALIGN, _BUSBW_ALIGN if high_busbw else 1)
        buckets = tuple(_buckets(specs, blocks, size, end_align, sharded))
        layouts.append(BufferLayout(param_dtype, grad_dtype, expert, buckets))
    return layouts


def _blocks(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Numbers of the parameters from the last one on; those of a unit together, in the unit's order."""
    blocks: list[list[int]] = []
    of_unit: dict[tuple, list[int]] = {}
    for i in reversed(range(len(specs))):
        spec = specs[i]
        kind = None if spec.unit is None else (spec.unit[0], spec.param_dtype, spec.grad_dtype, spec.expert)
        if kind in of_unit:
            of_unit[kind].append(i)
            continue
        blocks.append([i])
        if kind is not None:
            of_unit[kind] = blocks[-1]
    for block in of_unit.values():
        block.sort(key=lambda i: specs[i].unit[1])
    return blocks


def _bucket_size(
    specs: Sequence[ParamSpec], blocks: list[list[int]], size: int | None, count: int | None, ranks: int
) -> int:
    if count is not None:
        return max(1, sum(specs[i].numel for block in blocks for i in block) // count)
    return default_bucket_size(ranks) if size is None else size


def _buckets(
    specs: Sequence[ParamSpec], blocks: list[list[int]], size: int | None, end_align: int, sharded: bool
) -> Iterator[BucketLayout]:
    """size: None for one bucket."""
    start = end = 0
    slots: list[Slot] = []

    def closed() -> BucketLayout:
        nonlocal start, end, slots
        made = BucketLayout(start, _up(end, end_align), end - start, tuple(slots))
        start = end = made.end
        slots = []
        return made

    for block in blocks:
        alone = sharded and any(specs[i].shared for i in block)
        if alone and slots:
            yield closed()
        end = _up(end, ALIGN) if sharded else end
        for i in block:
            slots.append(Slot(i, end, end + specs[i].numel))
            end += specs[i].numel
        if alone or (size is not None and end - start >= size):
            yield closed()
    if slots:
        yield closed()


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
