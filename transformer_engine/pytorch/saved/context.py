"""The door itself: a client says what it takes, the context sees every tensor that is saved inside. torch asks the
innermost saved-tensor hooks alone; ours hand what their client does not take outward, to the next context around them
and at last to hooks that are not ours, so that contexts nest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch.recompute_phase import recompute_phase
from transformer_engine.pytorch.saved.marks import is_marked, keep, stays
from transformer_engine.pytorch.saved.standing import (
    Composed,
    Foreign,
    Kept,
    Saved,
    Taken,
    is_movable,
    is_parameter,
    unpack,
)

# Told of each tensor that a client takes, or that stays, and of what stands for it: te.memory_plan.
observers: list[Callable[[torch.Tensor, Saved | Kept], None]] = []

_autograd = torch._C._autograd


def in_torch_checkpoint() -> bool:
    """Whether torch.utils.checkpoint's way that is not reentrant hears of what is saved here. It numbers that, and
    finds it again by number in its second run, inside of the backward, where nothing is taken: had some of the first
    run been, gradients would be made of other tensors' values. Other hooks between it and here keep all of it from
    it."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


def is_recorded() -> bool:
    """Whether what runs here is recorded for a backward and kept until then, so that a client may take of it: not
    without gradients, in a backward, or inside of a checkpoint."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    return not (recompute_phase().enabled or in_torch_checkpoint())


def _stay(tensor: torch.Tensor) -> Kept:
    kept = Kept(tensor)
    for observe in observers:
        observe(tensor, kept)
    return kept


class Client:
    """What is saved together, as one layer's tensors are: derive, and say take(). A storage is offered once, with the
    first tensor in it; others share what was taken, until it is let go. Not offered: parameters, what is marked
    (marks.py), and classes of tensors that have no memory to take; a quantized tensor is offered part by part."""

    def __init__(self) -> None:
        self._memory: weakref.WeakValueDictionary[int, Taken] = weakref.WeakValueDictionary()

    @property
    def takes(self) -> bool:
        """Whether anything can be taken now."""
        return True

    def take(self, tensor: torch.Tensor) -> Taken | None:
        """What stands for the tensor's storage from now on; None: it is no concern of this client. Its live rows:
        live_rows(tensor) (rows.py). What this raises is raised by the operation that saves."""
        raise NotImplementedError(f"{type(self).__name__}: take() is the client's to say.")

    @property
    def taken(self) -> list[Taken]:
        """What is shared still, or was when it was taken, and is wanted by somebody."""
        return list(self._memory.values())

    def push(self, tensor: object, outward: Callable[[torch.Tensor], object] = _stay) -> object:
        """What stands for a tensor that is saved. outward: who has it where this client does not take it."""
        if hasattr(tensor, "prepare_for_saving") and not is_parameter(tensor):
            return Composed(tensor, lambda part: self.push(part, outward))
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"push_tensor: argument 'tensor' is a {type(tensor).__name__}, wanted a torch.Tensor.")
        memory = self._memory_of(tensor) if self.takes and is_movable(tensor) else None
        if memory is None:
            return outward(tensor)
        memory.add(tensor)
        saved = Saved(memory, tensor)
        for observe in observers:
            observe(tensor, saved)
        return saved

    def _memory_of(self, tensor: torch.Tensor) -> Taken | None:
        key = tensor.untyped_storage()._cdata
        if is_marked(tensor):
            keep([tensor])  # the object that carries the mark may be gone soon
        memory = self._memory.get(key)
        if memory is not None and memory.tensor is not None:  # else another storage may lie at this address by now
            return memory
        memory = None if stays(key) else self.take(tensor)
        if memory is not None:
            self._memory[key] = memory
        return memory


class Hooks:
    """`with Hooks(client):` offers the client what is saved inside. One for each entry. Where nothing is recorded for a
    backward it does nothing."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._outward: Callable[[torch.Tensor], object] | None = None  # None: it does nothing

    def __enter__(self) -> Hooks:
        if is_recorded():
            self._outward = _outward_of(_autograd._top_saved_tensors_default_hooks(True))
            _autograd._push_saved_tensors_default_hooks(self.pack, unpack)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._outward is not None:
            _autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor) -> object:
        return self.client.push(tensor, self._outward)


def _outward_of(hooks: tuple[Callable, Callable] | None) -> Callable[[torch.Tensor], object]:
    """Who is asked next, behind a context that is entered inside of these hooks."""
    if hooks is None:
        return _stay
    around = getattr(hooks[0], "__self__", None)
    return around.pack if isinstance(around, Hooks) else partial(Foreign, hooks)
