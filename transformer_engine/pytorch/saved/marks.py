"""Declarations of callers about single tensors: memory that is never moved, and the live rows of a tensor.

- A declaration is about memory, so it holds for every view of it.
- The mark is an attribute that other code may set too; it is read when a tensor is saved.
"""

from collections.abc import Iterable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor.fields import MARK

has_storage = _C.has_storage  # whether a tensor has memory of its own that may be moved
is_marked = _C.is_marked  # whether a tensor, or the base of which it is a view, carries the mark


def without_parts(tensor: object) -> tuple[list[torch.Tensor | None], object]:
    """(the parts of a quantized tensor, a copy of the object without them); the argument stays unchanged."""
    own = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor._twin()
    return own.prepare_for_saving()


def plain_parts(tensor: object) -> list[torch.Tensor]:
    """The tensors with memory: the tensor itself, or the parts of a quantized or otherwise composed one."""
    if hasattr(tensor, "prepare_for_saving"):
        return [t for t in without_parts(tensor)[0] if t is not None]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def checked(op: str, tensors: tuple) -> list[torch.Tensor]:
    """The plain tensors of the arguments, without None, which an optional operand may be."""
    found = []
    for i, t in enumerate(tensors):
        if t is None:
            continue
        if not isinstance(t, torch.Tensor) and not hasattr(t, "prepare_for_saving"):
            raise TypeError(f"{op}: argument {i} is a {type(t).__name__}, wanted a tensor; pass tensors one by one.")
        found += plain_parts(t)
    return found


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Their memory is not moved from now on."""
    _C.keep_storages(list(tensors))


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """The memory of these tensors is never moved, whichever layer saves it and through whichever view. The call sets
    the attribute `_TE_do_not_offload`. Setting that attribute directly, on a tensor, on its base, or on a quantized
    tensor or one of its parts, has the same effect for everything that a layer saves of it."""
    found = checked("mark_not_offload", tensors)
    for t in (*tensors, *found):
        if t is not None:
            setattr(t, MARK, True)
    keep(found)


def mark_pageable(tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int = 1) -> None:
    """Declares that only the first counter * unit_rows rows of `tensor` are live, whenever it is saved for a backward.
    A row is an index of its first dimension. counter: one integer on the tensor's device, which may change until the
    tensor is saved. The declaration holds for other tensors over the same bytes with as many rows. A second call
    replaces the first one.
    Errors: TypeError for a value other than a tensor, or a tensor composed of several (declare the parts); ValueError
    for a tensor of more than two dimensions or with gaps, since its live rows are no prefix of its memory, for rows
    that are not a multiple of unit_rows, and for a counter of another kind or device.
    """
    _C.declare_rows(tensor, counter, unit_rows)


def live_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """(counter, unit_rows) of a tensor that is being saved, or None if all rows are live. A declaration of the autograd
    node that saves it takes precedence."""
    return _C.live_rows(tensor)
