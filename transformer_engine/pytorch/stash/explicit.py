"""Tensors that a caller hands over and asks for again, beside any group and schedule."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.stash.group import bytes_of, span_of
from transformer_engine.pytorch.stash.handle import Handle, Piece, Region

if TYPE_CHECKING:
    from transformer_engine.pytorch.stash.manager import PagedStash


def stash(
    stash: PagedStash, name: Hashable, counted: list[tuple[torch.Tensor, torch.Tensor]], unit_rows: int, tail: str
) -> Handle:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "PagedStash.stash: called inside of a backward, wanted in a forward: what a backward makes is not kept for "
            "one. Open a group around the layer whose forward saves it."
        )
    handle = stash.step.handle(name, tail)
    for tensor, counter in counted:
        start, end = span_of(tensor)
        piece = Piece(bytes_of(tensor, start, end - start))
        rows = tensor.shape[0]
        piece.regions.append(
            Region(0, rows, tensor.nbytes // rows if rows else 0, counter, unit_rows, counter._version)
        )
        handle.pieces.append(piece)
    handle.like = [(tensor.dtype, tensor.shape) for tensor, _ in counted]
    stash.step.measure(handle)
    stash.step.note(handle, store=True)
    stash.step.start(handle)
    stash.step.free_leaving()
    return handle


def reload(stash: PagedStash, handle: Handle, keep: bool) -> list[torch.Tensor]:
    like = getattr(handle, "like", None)
    if like is None:
        raise TypeError(f"PagedStash.reload: argument 'handle' is {handle!r:.100}, wanted what stash() returned.")
    if handle.state == "gone" or handle.step.stash is not stash:
        raise handle.refusal("PagedStash.reload()")
    kept = handle.state == "kept"
    if not kept:
        if not keep:
            stash.step.note(handle, store=False)
        handle.start_load(keep)
        handle.finish_load()
    tensors = [
        torch.empty(0, dtype=dtype, device=piece.memory.device).set_(
            piece.memory.untyped_storage(), piece.memory.storage_offset() // dtype.itemsize, shape
        )
        for piece, (dtype, shape) in zip(handle.pieces, like, strict=True)
    ]
    if not keep:
        handle.give_up()
    elif not kept:
        handle.park()
    return tensors
