"""A group as a client of the saved door: what is saved inside of it and says how many of its rows are alive is its
own; everything else goes outward. When that leaves and comes back is the manager's."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.saved import Client, Hooks, Taken, is_recorded, live_rows
from transformer_engine.pytorch.stash.handle import Handle
from transformer_engine.pytorch.stash.pieces import Piece, Region, bytes_of, span_of
from transformer_engine.pytorch.stash.pool import MOST_MEMBERS
from transformer_engine.pytorch.stash.step import Stash, Step


class Stashed(Taken):
    """A storage that saved tensors of one group lie in."""

    __slots__ = ("group", "handle", "piece")

    back = "a copy out of the pages"

    def __init__(self, group: Group, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        storage = tensor.untyped_storage()
        self.handle, self.group = group.handle, group
        self.piece = Piece(bytes_of(tensor, 0, storage.nbytes()))

    @property
    def status(self) -> str:
        return "kept" if self.handle.state in ("kept", "gone") else "stashed"

    def add(self, tensor: torch.Tensor) -> None:
        if self.tensor is not None:
            self.group.place(self.piece, tensor)
        super().add(tensor)

    def fetch(self) -> None:
        """A backward reads it: what nobody has brought back is brought back now."""
        if self.tensor is None and not self.written:
            self.handle.step.wanted(self.handle)

    def restore(self) -> torch.Tensor:
        self.fetch()
        if self.piece.memory is None:
            raise self.handle.refusal("its backward")
        return self.piece.memory

    def __del__(self) -> None:
        group = getattr(self, "group", None)
        if group is not None:
            if self.handle.state in ("kept", "back"):
                self.piece.memory = None
            group.dropped()


def _let_go(ref: weakref.ref[Stashed]) -> None:
    taken = ref()
    if taken is not None:
        taken.let_go()


class Group(Client):
    """`with stash.group(name, counts):`, once."""

    def __init__(self, stash: Stash, name: Hashable, counts: torch.Tensor | None, tail: str) -> None:
        super().__init__()
        self.stash, self.name, self.counts, self.tail = stash, name, counts, tail
        self.handle: Handle | None = None
        self._step: Step | None = None  # in which it was entered
        self.rows: int | None = None  # of the tensors that our nodes count by `counts`
        self._members = 0
        self._wide: dict[int, torch.Tensor] = {}  # copies of counters
        self._hooks = Hooks(self)
        self._open, self._wanted, self._before = False, 0, None

    def __enter__(self) -> Group:
        if self.handle is not None:
            raise RuntimeError(f"PagedStash: group {self.name!r} was entered before; call stash.group() again.")
        if is_recorded():
            self._step = self.stash.step
            self.handle = self._step.open(self.name, self.tail)
            self._open, self._before = True, _C.set_live_tokens(self.counts)
            self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._open:
            return
        self._hooks.__exit__(*raised)
        _C.set_live_tokens(self._before)
        self._open = False
        leaving = [t for t in self.taken if t.tensor is not None and t.piece.regions and not t.stays]
        self.handle.pieces = [t.piece for t in leaving]
        self.handle.freed = [partial(_let_go, weakref.ref(t)) for t in leaving]
        self._step.exit(self.handle, raised[0] is not None)

    @property
    def takes(self) -> bool:
        return self._open

    def take(self, tensor: torch.Tensor) -> Stashed | None:
        if tensor.numel() == 0 or live_rows(tensor) is None:
            return None
        if tensor.device != self.stash.device:
            raise ValueError(
                f"PagedStash: group {self.name!r} saves a tensor {list(tensor.shape)} on {tensor.device} whose "
                f"rows are counted, wanted {self.stash.device}, the pool's; make one PagedStash for each device."
            )
        taken = Stashed(self, tensor)
        self._wanted += 1
        return taken

    def place(self, piece: Piece, tensor: torch.Tensor) -> None:
        """`tensor` lies in a region of the piece, or makes a new one."""
        if tensor.numel() == 0:
            return
        found = live_rows(tensor)
        start, end = span_of(tensor)
        inside = next((r for r in piece.regions if r.offset <= start and end <= r.end), None)
        if found is None:
            if inside is None:
                raise ValueError(
                    f"PagedStash: group {self.name!r} saves a tensor {list(tensor.shape)} that lies in one "
                    "storage with a tensor whose rows are counted, and not in its rows: it could not come back. Say "
                    "how many of its rows are alive (mark_pageable), or clone it."
                )
            return
        counter, unit_rows = found
        rows = tensor.shape[0]
        if self.counts is not None and counter.data_ptr() == self.counts.data_ptr() and self._announced(tensor):
            if self.rows not in (None, rows):
                raise ValueError(
                    f"PagedStash: group {self.name!r} saves tensors of {self.rows} rows and of {rows}, and its "
                    "counts are said of one number of rows. Open a group for each, or declare the tensors of one "
                    "(mark_pageable)."
                )
            self.rows = rows
        if rows % unit_rows:
            raise ValueError(
                f"PagedStash: group {self.name!r} saves a tensor of {rows} rows, wanted a multiple of the "
                f"{unit_rows} rows that its counter counts by."
            )
        if counter.dtype in (torch.int8, torch.int16):  # which the engine does not read
            counter = self._wide.setdefault(counter.data_ptr(), counter.to(torch.int32))
        region = Region(start, rows, tensor.nbytes // rows, counter, unit_rows, counter._version)
        if inside is None:
            if any(start < r.end and r.offset < end for r in piece.regions):
                raise ValueError(
                    f"PagedStash: group {self.name!r} saves a tensor {list(tensor.shape)} that shares a part "
                    "of its memory with another one whose rows are counted, wanted tensors apart, or one in the other."
                )
            self._members += 1
            if self._members > MOST_MEMBERS:
                raise ValueError(
                    f"PagedStash: group {self.name!r} saves more than {MOST_MEMBERS} tensors whose rows are "
                    "counted, wanted at most as many; open a second group for the others."
                )
            piece.regions.append(region)
        elif (inside.offset, inside.counter.data_ptr(), inside.unit_rows * inside.row_bytes) != (
            start,
            counter.data_ptr(),
            unit_rows * region.row_bytes,
        ):
            raise ValueError(
                f"PagedStash: group {self.name!r} saves a tensor {list(tensor.shape)} that lies in another one whose "
                "rows are counted, and whose live rows are not the first of both; say one counter for the rows of "
                "both, or clone it."
            )

    @staticmethod
    def _announced(tensor: torch.Tensor) -> bool:
        return _C.announced_rows(tensor) is not None

    def dropped(self) -> None:
        """A storage of it is wanted by nobody any more; with the last one the group is."""
        self._wanted -= 1
        if self._wanted == 0 and not self._open:
            self.handle.step.dropped(self.handle)
