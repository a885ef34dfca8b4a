"""The door itself: a client says what it takes, the context sees every tensor that is saved inside. torch asks the
innermost saved-tensor hooks alone; ours hand what their client does not take outward, to the next context around them
and at last to hooks that are not ours, so that contexts nest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch.saved.standing import Composed, Foreign, pop_pythons
from transformer_engine.pytorch.tensor.fields import MARK

# `with observed(told):` told(tensor, saved) is called for each tensor that this thread saves and a client takes, or
# that stays, with what stands for it: te.memory_plan.
observed = _C.SavedObserver

# What is saved together, as one layer's tensors are: derive, and say take(tensor), what stands for the tensor's storage
# from now on, or None: it is no concern of this client. takes: whether anything can be taken now. What take() raises is
# raised by the operation that saves. A storage is offered once, with the first tensor in it; others share what was
# taken, until it is let go. Not offered: parameters, what is marked (marks.py), and classes of tensors that have no
# memory to take; a quantized tensor is offered part by part. taken: what is shared still, or was when it was taken, and
# is wanted by somebody. push(tensor, outward): what stands for a tensor that is saved; outward has it where this client
# does not take it.
StorageHandler = _C.StorageHandler

# Whether what runs here is recorded for a backward and kept until then, so that a client may take of it: not without
# gradients, in a backward, or inside of a checkpoint.
is_recorded = _C.is_recorded


class Hooks(_C.SavedHooks):
    """`with Hooks(client):` offers the client what is saved inside. One for each entry. Where nothing is recorded for a
    backward it does nothing."""

    def __enter__(self) -> Hooks:
        if is_recorded():
            self.push()
        return self

    def __exit__(self, *raised: object) -> None:
        self.pop()


def _outward_of(hooks: tuple[Callable, Callable]) -> Callable[[torch.Tensor], object]:
    """Who is asked next, behind a context that is entered inside of these hooks."""
    around = getattr(hooks[0], "__self__", None)
    return around.pack if isinstance(around, _C.SavedHooks) else partial(Foreign, hooks)


def _composed(client: StorageHandler, tensor: object, outward: Callable[[torch.Tensor], object] | None) -> Composed:
    return Composed(tensor, lambda part: client.push(part, outward))


_C.set_saved_hooks(recompute_phase(), MARK, _composed, _outward_of, pop_pythons)
