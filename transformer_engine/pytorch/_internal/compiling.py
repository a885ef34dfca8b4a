"""What torch.compile and other tracers meet: refusals in their own words, first, and how a module makes what outlives
a call that is traced. Decides nothing."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch._internal import torch_private


@functools.cache
def _kind(eager: type) -> type:
    error, _ = torch_private.user_error()

    class NotCompiled(error, eager):
        """As eager's refusals, and as Dynamo's errors about a user's code."""

    return NotCompiled


def refuse_traced(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind` where torch.compile traces. An exception that traced code raises would be told as
    "Observed exception", with advice that is none, and swallowed where a graph may break; what raises here is run by
    the tracer, not traced."""
    _, invalid_input = torch_private.user_error()
    raise _kind(kind)(invalid_input, message)


# What torch.compiler.assume_constant_result does, but that imports all of Dynamo to do it.
refuse_traced._dynamo_marked_constant = True


def differs(size: int, wanted: int) -> bool:
    """Whether they do. Where torch.compile will know the size in a run alone (it follows from values, as
    torch.bincount's does), it is taken as wanted from here on, and a run in which it is not raises."""
    if not torch.compiler.is_compiling():
        return size != wanted
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports all of sympy

    if guard_or_false(size != wanted):
        return True
    torch_private.check(size == wanted)
    return False


def in_a_mode() -> bool:
    """Whether what is made now may be a tracer's: FakeTensorMode's or its like's, or a transform's of torch.func."""
    return torch_private.is_in_torch_dispatch_mode() or torch_private.peek_interpreter_stack() is not None


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """For tensors that outlive the call: made as outside of inference mode, of FakeTensorMode and its like, and of
    torch.func's transforms, whose tensors are nothing behind them."""
    with torch.inference_mode(False), torch_private.disable_current_modes(), torch_private.DisableFuncTorch():
        yield


def refuse(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind`, traced or not."""
    if torch.compiler.is_compiling():
        refuse_traced(message, kind)
    raise kind(message)
