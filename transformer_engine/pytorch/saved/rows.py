"""Live rows: how many rows of a kept tensor hold anything may be known on the device alone. Who makes the tensor says
where that number is; a client that packs tensors by their live rows asks here. Nothing is read or counted here."""

import torch

from transformer_engine.pytorch import _C


def mark_pageable(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int = 1) -> None:
    """Only the first counter * unit_rows rows of `tensor` hold anything, whenever it is kept for a backward. A row is
    an index of its first dimension. counter: one integer on the tensor's device, which may change until it is saved.
    What is meant is the memory: other tensors over the same bytes with as many rows are meant as well. Called again, it
    replaces what was said before.
    Errors: TypeError for what is no tensor or is composed of several (declare the parts); ValueError for a tensor of
    more than two dimensions or one with gaps, whose live rows are no prefix of its memory, for rows that are no
    multiple of unit_rows, and for a counter of another kind or device.
    """
    _C.declare_rows(tensor, counter, unit_rows)


def live_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """(counter, unit_rows) of a tensor that is being saved, or None: all of its rows count. What the node that saves it
    announces itself comes first."""
    return _C.live_rows(tensor)
