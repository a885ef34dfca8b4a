"""A part of a parameter's elements as a tensor of the parameter's shape that torch.distributed.checkpoint saves and
loads as boxes of that shape. Nothing computes with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

from transformer_engine.pytorch._internal.torch_private import make_wrapper_subclass


class Box(NamedTuple):
    """A rectangular part of a shape; first: its first element among the flattened ones."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements [start, end) of the flattened shape, in order: at most 2 d - 1 boxes for d dimensions."""
    return [Box(*one) for one in _boxes(tuple(shape), start, end, 0)] if start < end else []


def _boxes(shape: tuple[int, ...], start: int, end: int, first: int) -> Iterator[tuple]:
    """first: of the shape's own elements, where it is a row of a larger one."""
    if len(shape) <= 1:
        yield (start,) * len(shape), (end - start,) * len(shape), first + start
        return
    row = math.prod(shape[1:])
    begin, last = -(-start // row), end // row  # rows that are whole
    if begin > last:  # within one row
        yield from _in_row(shape, last, start - last * row, end - last * row, first)
        return
    if start < begin * row:
        yield from _in_row(shape, begin - 1, start - (begin - 1) * row, row, first)
    if begin < last:
        yield (begin, *(0,) * (len(shape) - 1)), (last - begin, *shape[1:]), first + begin * row
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row, first)


def _in_row(shape: tuple[int, ...], number: int, start: int, end: int, first: int) -> Iterator[tuple]:
    row = math.prod(shape[1:])
    for offsets, sizes, at in _boxes(shape[1:], start, end, first + number * row):
        yield (number, *offsets), (1, *sizes), at


class FlatShard(torch.Tensor):
    """Elements [start, end) of a flattened tensor of `shape`; local: their values."""

    local: torch.Tensor
    start: int
    end: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], start: int, end: int) -> FlatShard:
        self = make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        self.local, self.start, self.end = local.detach().view(-1), start, end
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (self,) = args
            return FlatShard(self.local, self.shape, self.start, self.end)
        raise NotImplementedError(
            f"FlatShard: {func} was called on elements {args[0].start} to {args[0].end} of a tensor, wanted its part "
            "`local`: this holds what one rank has, for torch.distributed.checkpoint."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FlatShard(elements {self.start} to {self.end} of {list(self.shape)}, {self.dtype})"

    # The protocol of torch.distributed.checkpoint.

    def _view(self, box: Box) -> torch.Tensor:
        count = math.prod(box.sizes)
        return self.local[box.first - self.start : box.first - self.start + count].view(box.sizes)

    # torch.distributed.checkpoint is imported here: with the package it would double the time of its import.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for box in boxes(self.shape, self.start, self.end)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in boxes(self.shape, self.start, self.end)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in boxes(self.shape, self.start, self.end):
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self._view(box)
        begins = [box.offsets for box in boxes(self.shape, self.start, self.end)]
        raise ValueError(
            f"FlatShard: no part of '{index.fqn}' begins at {index.offset} on this rank, wanted one of {begins}."
        )
