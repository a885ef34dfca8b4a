"""What stands for a saved tensor until a backward wants it. A tensor that stays (Kept) is watched for changes; one that
a client took (Saved) comes back as the view that it was, of memory that all views share (PackedStorage): these are
csrc/saved_hooks/saved_tensor_hooks.h's. Here is what is Python's: hooks that are not ours, and quantized tensors.
Who takes what is the client's.

Clients derive PackedStorage, a storage that was taken, whole, for all saved tensors that lie in it; it lives as long as
one of them is wanted. The device memory is held, and every saved tensor's version watched, until the client has a copy
and calls let_go(); from then on restore() is asked. status, back: what te.memory_plan says of it, and of what bringing
it back costs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.saved.marks import is_marked, keep, taken_apart

PackedStorage, Saved, Kept = _C.PackedStorage, _C.Saved, _C.Kept
pop_saved = _C.pop_saved  # the tensor that something stands for; a tensor stands for itself
unpack = _C.unpack_saved  # the same in a backward: what is away is brought back first, all parts of it at once


class Foreign:
    """A tensor that hooks around ours have packed: it is theirs, checks included."""

    __slots__ = ("packed", "unpack")

    def __init__(self, hooks: tuple[Callable, Callable], tensor: torch.Tensor) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def fetch(self) -> None: ...

    def pop(self) -> torch.Tensor:
        return self.unpack(self.packed)


class Composed:
    """A quantized tensor: the object without its parts, and what stands for them."""

    __slots__ = ("parts", "shell")

    def __init__(self, tensor: object, push: Callable[[torch.Tensor], object]) -> None:
        parts, self.shell = taken_apart(tensor)
        there = [part for part in parts if part is not None]
        if is_marked(tensor) or any(is_marked(part) for part in there):
            keep(there)  # all of them: a tensor of which a part has to come back is not there
        self.parts = [None if part is None else push(part) for part in parts]

    def fetch(self) -> None:
        for part in self.parts:
            if part is not None:
                part.fetch()

    def pop(self) -> object:
        self.shell.restore_from_saved([None if part is None else pop_saved(part) for part in self.parts])
        whole, (_, self.shell) = self.shell, taken_apart(self.shell)
        return whole


def pop_pythons(saved: object, fetch: bool) -> object:
    """What comes back for what stands for a tensor here."""
    if isinstance(saved, (Foreign, Composed)):
        if fetch:
            saved.fetch()
        return saved.pop()
    if not isinstance(saved, torch.Tensor):
        raise TypeError(f"pop_tensor: argument 'saved' is a {type(saved).__name__}, wanted what push_tensor() gave.")
    return saved
