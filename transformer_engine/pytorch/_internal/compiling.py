"""Errors and tensors under torch.compile and other tracers: errors keep their own text, and tensors that outlive a
traced call are made outside of the tracer. It decides nothing."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch._internal import torch_private


@functools.cache
def _kind(eager: type) -> type:
    error, _ = torch_private.user_error()

    class NotCompiled(error, eager):
        """The same type as eager's errors, and also Dynamo's type for errors of user code."""

    return NotCompiled


def refuse_traced(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind` where torch.compile traces. Dynamo would report an exception of traced code as "Observed
    exception", with wrong advice, and would drop it where a graph may break; the tracer runs this function instead of
    tracing it."""
    _, invalid_input = torch_private.user_error()
    raise _kind(kind)(invalid_input, message)


# The same as torch.compiler.assume_constant_result, which imports all of Dynamo.
refuse_traced._dynamo_marked_constant = True


def differs(size: int, wanted: int) -> bool:
    """Whether the sizes differ. If torch.compile has the size only in a run (it follows from values, as
    torch.bincount's does), it is assumed to be the wanted one from here on, and a run with another size raises."""
    if not torch.compiler.is_compiling():
        return size != wanted
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports all of sympy

    if guard_or_false(size != wanted):
        return True
    torch_private.check(size == wanted)
    return False


def in_a_mode() -> bool:
    """Whether a tensor that is made now may belong to a tracer: FakeTensorMode or the like, or a torch.func
    transform."""
    return torch_private.is_in_torch_dispatch_mode() or torch_private.peek_interpreter_stack() is not None


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """For tensors that outlive the call: made outside of inference mode, of FakeTensorMode and the like, and of
    torch.func's transforms, whose tensors are invalid after the transform."""
    with torch.inference_mode(False), torch_private.disable_current_modes(), torch_private.DisableFuncTorch():
        yield


def refuse(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind`, traced or not."""
    if torch.compiler.is_compiling():
        refuse_traced(message, kind)
    raise kind(message)
