"""What the caller says of single tensors: that they are never to be moved. What is meant is its memory, so that every
view of it is meant as well. The mark is an attribute that anyone may set; what carries it is known when it is saved."""

from collections.abc import Iterable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor.fields import MARK

has_storage = _C.has_storage  # whether there is memory that may be moved, and told from other memory
is_marked = _C.is_marked  # whether it carries the mark, or what it is a view of does


def taken_apart(tensor: object) -> tuple[list[torch.Tensor | None], object]:
    """(the parts of a quantized tensor, the object without them); the caller's stays whole."""
    own = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor._twin()
    return own.prepare_for_saving()


def plain_parts(tensor: object) -> list[torch.Tensor]:
    """The tensors that have memory: itself, or the parts of a quantized or otherwise composed one."""
    if hasattr(tensor, "prepare_for_saving"):
        return [t for t in taken_apart(tensor)[0] if t is not None]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def checked(op: str, tensors: tuple) -> list[torch.Tensor]:
    """The plain tensors in the arguments; None is let through, as an optional operand may be."""
    found = []
    for i, t in enumerate(tensors):
        if t is None:
            continue
        if not isinstance(t, torch.Tensor) and not hasattr(t, "prepare_for_saving"):
            raise TypeError(f"{op}: argument {i} is a {type(t).__name__}, wanted a tensor; pass tensors one by one.")
        found += plain_parts(t)
    return found


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Their memory stays from now on."""
    _C.keep_storages(list(tensors))


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """The memory of these tensors is never moved, whoever saves it and through whichever view. They carry
    `_TE_do_not_offload` afterwards; to set that attribute oneself, on a tensor, on what it is a view of, or on a
    quantized tensor or one of its parts, means the same of whatever of it a layer saves."""
    found = checked("mark_not_offload", tensors)
    for t in (*tensors, *found):
        if t is not None:
            setattr(t, MARK, True)
    keep(found)
