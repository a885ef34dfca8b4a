"""The Python part of saved-tensor hooks: the context that packs saved tensors, foreign hooks and quantized tensors.

- csrc/saved_hooks/saved_tensor_hooks.h has the rest: a tensor that stays is checked for changes; one in a packed
  storage (Saved) is unpacked as the view that it was, of memory that all views share (PackedStorage).
- torch calls only the innermost saved-tensor hooks. These pass what their handler does not take to the next context
  around them, and at last to foreign hooks, so that contexts nest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch.saved.marks import is_marked, keep, without_parts
from transformer_engine.pytorch.tensor.fields import MARK

# `with observed(callback):` calls callback(tensor, saved) for each tensor that this thread saves and that a handler
# takes, or that stays; `saved` represents the tensor. For te.memory_plan.
observed = _C.SavedObserver

# Handles the tensors that are saved together, for example those of one layer.
# - take(tensor), to be overridden: the PackedStorage that represents the tensor's storage from now on, or None. The
#   operation that saves raises what take() raises.
# - takes, to be overridden: whether anything can be taken now.
# - A storage is offered once, with the first tensor in it; others share the result until let_go().
# - Parameters, marked tensors (marks.py) and classes without memory of their own are not offered; a quantized tensor is
#   offered part by part.
# - taken: the packed storages that are still referenced.
# - push(tensor, outward): what represents a saved tensor; outward gets it if this handler does not take it.
StorageHandler = _C.StorageHandler

# A whole storage that a handler took, for all saved tensors in it; it lives as long as one of them is referenced.
# - It holds the device memory, and checks the version of each saved tensor, until the handler has a copy and calls
#   let_go(); after that restore() is called.
# - status, back: for te.memory_plan, where it is, and what bringing it back costs.
PackedStorage = _C.PackedStorage

Saved = _C.Saved
pop_saved = _C.pop_saved  # unpacks what represents a tensor; a tensor represents itself
unpack = _C.unpack_saved  # the same in a backward: all parts that are not on the device are fetched first

# Whether what runs here is recorded for a backward and saved until then: false without gradients, in a backward, and
# inside of a checkpoint.
is_recorded = _C.is_recorded


class Hooks(_C.SavedHooks):
    """`with Hooks(handler):` offers the handler what is saved inside. Use an instance once. It does nothing unless the
    block is recorded for a backward."""

    def __enter__(self) -> Hooks:
        if is_recorded():
            self.push()
        return self

    def __exit__(self, *raised: object) -> None:
        self.pop()


class ForeignHook:
    """A tensor packed by hooks around ours that are not from this library; they check it themselves."""

    __slots__ = ("packed", "unpack")

    def __init__(self, hooks: tuple[Callable, Callable], tensor: torch.Tensor) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def fetch(self) -> None: ...

    def pop(self) -> torch.Tensor:
        return self.unpack(self.packed)


class PackedQuantized:
    """A quantized tensor: the object without its parts, and what represents each part."""

    __slots__ = ("parts", "shell")

    def __init__(self, tensor: object, push: Callable[[torch.Tensor], object]) -> None:
        parts, self.shell = without_parts(tensor)
        present = [part for part in parts if part is not None]
        if is_marked(tensor) or any(is_marked(part) for part in present):
            keep(present)  # all of them: the tensor is not on the device while a part is missing
        self.parts = [None if part is None else push(part) for part in parts]

    def fetch(self) -> None:
        for part in self.parts:
            if part is not None:
                part.fetch()

    def pop(self) -> object:
        self.shell.restore_from_saved([None if part is None else pop_saved(part) for part in self.parts])
        tensor, (_, self.shell) = self.shell, without_parts(self.shell)
        return tensor


def _pop_python(saved: object, fetch: bool) -> object:
    """Unpacks what the classes here represent. fetch: bring it to the device first."""
    if isinstance(saved, (ForeignHook, PackedQuantized)):
        if fetch:
            saved.fetch()
        return saved.pop()
    if not isinstance(saved, torch.Tensor):
        raise TypeError(
            f"pop_tensor: argument 'saved' is a {type(saved).__name__}, wanted the result of push_tensor()."
        )
    return saved


def _outward_of(hooks: tuple[Callable, Callable]) -> Callable[[torch.Tensor], object]:
    """The pack function of hooks that are around a context."""
    around = getattr(hooks[0], "__self__", None)
    return around.pack if isinstance(around, _C.SavedHooks) else partial(ForeignHook, hooks)


def _pack_quantized(
    handler: StorageHandler, tensor: object, outward: Callable[[torch.Tensor], object] | None
) -> PackedQuantized:
    return PackedQuantized(tensor, lambda part: handler.push(part, outward))


_C.set_saved_hooks(recompute_phase(), MARK, _pack_quantized, _outward_of, _pop_python)
