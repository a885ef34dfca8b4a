"""Tensors that a caller hands over and asks for again, beside any group and schedule."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from transformer_engine.pytorch.stash.handle import Handle
from transformer_engine.pytorch.stash.pieces import Piece, own_bytes
from transformer_engine.pytorch.stash.step import Stash


def stash(
    stash: Stash, name: Hashable, counted: list[tuple[torch.Tensor, torch.Tensor]], unit_rows: int, tail: str
) -> Handle:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "PagedStash.stash: called inside of a backward, wanted in a forward: what a backward makes is not kept for "
            "one. Open a group around the layer whose forward saves it."
        )
    handle = stash.step.handle(name, tail)
    for tensor, counter in counted:
        piece, rows = Piece(own_bytes(tensor)), tensor.shape[0]
        piece.add(0, rows, tensor.nbytes // rows if rows else 0, counter, unit_rows)
        handle.add(piece)
    handle.like = [(tensor.dtype, tensor.shape) for tensor, _ in counted]
    stash.step.measure(handle)
    stash.step.note(handle, store=True)
    stash.step.start(handle)
    stash.step.free_leaving()
    if handle.state == "kept":  # there is no pool yet, and the caller may write into the originals from here on
        for piece, (tensor, counter) in zip(handle.pieces, counted, strict=True):
            piece.memory = _copied(tensor, counter, unit_rows, tail)
    return handle


def _copied(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int, tail: str) -> torch.Tensor:
    """Its bytes, with the tail that a reload would write; the host knows no count."""
    copy = own_bytes(tensor).clone()
    if tail != "keep" and copy.numel():
        rows = copy.view(tensor.shape[0], -1)
        behind = torch.arange(len(rows), device=rows.device) >= counter.reshape(()).to(torch.int64) * unit_rows
        rows.masked_fill_(behind[:, None], 0)
    return copy


def reload(stash: Stash, handle: Handle, keep: bool) -> list[torch.Tensor]:
    like = getattr(handle, "like", None)
    if like is None:
        raise TypeError(f"PagedStash.reload: argument 'handle' is {handle!r:.100}, wanted what stash() returned.")
    if handle.state == "gone" or handle.step.stash is not stash:
        raise handle.refusal("PagedStash.reload()")
    kept = handle.state == "kept"
    if not keep:
        stash.step.note(handle, store=False)
    if not kept:
        handle.start_load(keep)
        handle.finish_load()
    memories = [piece.memory.clone() if kept and keep else piece.memory for piece in handle.pieces]
    tensors = [
        torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), 0, shape)
        for memory, (dtype, shape) in zip(memories, like, strict=True)
    ]
    if not keep:
        handle.give_up()
    elif not kept:
        handle.park()
    return tensors
