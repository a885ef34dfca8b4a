"""What is refused while torch.compile traces: in its own words, first. Decides nothing."""

import functools

import torch


@functools.cache
def _kind(eager: type) -> type:
    from torch._dynamo.exc import UserError  # which nobody needs who does not compile

    class NotCompiled(UserError, eager):
        """As eager's refusals, and as Dynamo's errors about a user's code."""

    return NotCompiled


def refuse_traced(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind` where torch.compile traces. An exception that traced code raises would be told as
    "Observed exception", with advice that is none, and swallowed where a graph may break; what raises here is run by
    the tracer, not traced."""
    from torch._dynamo.exc import UserErrorType

    raise _kind(kind)(UserErrorType.INVALID_INPUT, message)


# What torch.compiler.assume_constant_result does, but that imports all of Dynamo to do it.
refuse_traced._dynamo_marked_constant = True


def refuse(message: str, kind: type = NotImplementedError) -> None:
    """Raises a `kind`, traced or not."""
    if torch.compiler.is_compiling():
        refuse_traced(message, kind)
    raise kind(message)
