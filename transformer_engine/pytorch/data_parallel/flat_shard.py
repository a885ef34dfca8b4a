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


class Cut(NamedTuple):
    """This rank's part of a parameter that tensor parallelism divides along `dim`, each of its stacked parts by itself.
    parts: their sizes here, in order."""

    dim: int
    rank: int
    ranks: int
    parts: tuple[int, ...]

    def full_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return *shape[: self.dim], shape[self.dim] * self.ranks, *shape[self.dim + 1 :]

    def pieces(self, offsets: tuple[int, ...], values: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Values that begin at `offsets` of the part, as boxes of the whole parameter and where these begin."""
        dim, begin, at = self.dim, 0, offsets[self.dim]
        for size in self.parts:
            first, last = max(at, begin), min(at + values.shape[dim], begin + size)
            if first < last:
                offset = begin * self.ranks + self.rank * size + first - begin
                yield (*offsets[:dim], offset, *offsets[dim + 1 :]), values.narrow(dim, first - at, last - first)
            begin += size


class FlatShard(torch.Tensor):
    """Elements [start, end) of a flattened tensor of `shape`; local: their values. cut: that tensor is this rank's part
    of the one whose shape the FlatShard has."""

    local: torch.Tensor
    own_shape: tuple[int, ...]
    start: int
    end: int
    cut: Cut | None = None

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, shape: Sequence[int], start: int, end: int, cut: Cut | None = None
    ) -> FlatShard:
        full_shape = tuple(shape) if cut is None else cut.full_shape(shape)
        self = make_wrapper_subclass(cls, full_shape, dtype=local.dtype, device=local.device)
        self.local, self.own_shape, self.cut = local.detach().reshape(-1), tuple(shape), cut
        self.start, self.end = start, end
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (self,) = args
            return FlatShard(self.local, *self.place)
        raise NotImplementedError(
            f"FlatShard: {func} was called on elements {args[0].start} to {args[0].end} of a tensor, wanted its part "
            "`local`: this holds what one rank has, for torch.distributed.checkpoint."
        )

    @property
    def place(self) -> tuple[tuple[int, ...], int, int, Cut | None]:
        # A pickle of before there were cuts has none, and no own_shape.
        return self.__dict__.get("own_shape", tuple(self.shape)), self.start, self.end, self.cut

    def __repr__(self, *, tensor_contents: object = None) -> str:
        of = "" if self.cut is None else f", part {self.cut.rank} of {self.cut.ranks} of {list(self.shape)}"
        return f"FlatShard(elements {self.start} to {self.end} of {list(self.place[0])}{of}, {self.dtype})"

    # The protocol of torch.distributed.checkpoint.

    def _pieces(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Rectangular parts of the whole tensor: where they begin, and their values, in its memory. Of a tensor without
        elements there is one, as files have an entry of each tensor."""
        if not self.numel():
            yield (0,) * self.dim(), self.local.view(self.shape)
            return
        for box in boxes(self.place[0], self.start, self.end):
            first = box.first - self.start
            values = self.local[first : first + math.prod(box.sizes)].view(box.sizes)
            if self.cut is None:
                yield box.offsets, values
            else:
                yield from self.cut.pieces(box.offsets, values)

    # torch.distributed.checkpoint is imported here: with the package it would double the time of its import.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self._pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        pieces = dict(self._pieces())
        offset = None if index.offset is None else tuple(index.offset)
        if offset in pieces:
            return pieces[offset]
        raise ValueError(
            f"FlatShard: no part of '{index.fqn}' begins at {index.offset} on this rank, wanted one of {list(pieces)}."
        )
