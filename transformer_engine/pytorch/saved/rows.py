"""Live rows: how many rows of a kept tensor hold anything may be known on the device alone. Who makes the tensor says
where that number is; a client that packs tensors by their live rows asks here. Nothing is read or counted here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.saved.storages import Storages, has_storage

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Rows(NamedTuple):
    """rows, bytes: of the tensor that was declared, so that a view which cuts its memory otherwise is told from it."""

    rows: int
    bytes: int
    counter: torch.Tensor
    unit_rows: int


_declared = Storages()  # -> {where in it, in bytes: _Rows}


def mark_pageable(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int = 1) -> None:
    """Only the first counter * unit_rows rows of `tensor` hold anything, whenever it is kept for a backward. A row is
    an index of its first dimension. counter: one integer on the tensor's device, which may change until it is saved.
    What is meant is the memory: other tensors over the same bytes with as many rows are meant as well. Called again, it
    replaces what was said before.
    Errors: TypeError for what is no tensor or is composed of several (declare the parts); ValueError for a tensor of
    more than two dimensions or one with gaps, whose live rows are no prefix of its memory, for rows that are no
    multiple of unit_rows, and for a counter of another kind or device.
    """
    op = "mark_pageable"
    for name, t in (("tensor", tensor), ("counter", counter)):
        if type(t) is not torch.Tensor or not has_storage(t):
            raise TypeError(
                f"{op}: argument '{name}' is a {type(t).__name__}, wanted a plain torch.Tensor with memory of its own; "
                "declare the parts of a quantized tensor one by one."
            )
    if tensor.ndim not in (1, 2):
        raise ValueError(
            f"{op}: argument 'tensor' has shape {list(tensor.shape)}, wanted one or two dimensions, so that it is "
            "plain what a row is; pass tensor.flatten(0, -2), or whichever rows are counted."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: argument 'tensor' {list(tensor.shape)} has strides {list(tensor.stride())}, wanted a contiguous "
            "one: live rows are to be the first bytes of its memory."
        )
    if type(unit_rows) is not int or unit_rows < 1:
        raise ValueError(f"{op}: argument 'unit_rows' is {unit_rows!r:.100}, wanted an int from 1 on.")
    if tensor.shape[0] % unit_rows != 0:
        raise ValueError(
            f"{op}: argument 'tensor' has {tensor.shape[0]} rows, wanted a multiple of 'unit_rows', {unit_rows}: "
            "the counter counts whole units."
        )
    if counter.dtype not in _INTEGERS or counter.numel() != 1 or counter.device != tensor.device:
        raise ValueError(
            f"{op}: argument 'counter' is {counter.dtype} {list(counter.shape)} on {counter.device}, wanted one "
            f"integer on {tensor.device}, where the tensor is."
        )
    storage = tensor.untyped_storage()
    said = _declared.get(storage._cdata)
    declared = _Rows(tensor.shape[0], tensor.nbytes, counter.detach(), unit_rows)
    _declared.put(storage, {**(said or {}), _offset(tensor): declared})


def live_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """(counter, unit_rows) of a tensor that is being saved, or None: all of its rows count. What the node that saves it
    announces itself comes first."""
    if isinstance(tensor, torch.Tensor) and (announced := _C.announced_rows(tensor)) is not None:
        return announced
    if type(tensor) is not torch.Tensor or not has_storage(tensor):
        return None
    said = _declared.get(tensor.untyped_storage()._cdata)
    found = None if said is None else said.get(_offset(tensor))
    if found is None or tensor.ndim == 0 or not tensor.is_contiguous():
        return None
    same = tensor.shape[0] == found.rows and tensor.nbytes == found.bytes
    return (found.counter, found.unit_rows) if same else None


def _offset(t: torch.Tensor) -> int:
    return t.storage_offset() * t.element_size()
