"""Names whose capability this version lacks: they can be imported, subclassed and asked about, and say so when they are
used. One decorator; it does nothing else."""

import functools
from collections.abc import Callable

import torch


def refusal(name: str, capability: str, instead: str = "") -> NotImplementedError:
    advice = f"; {instead}" if instead else ""
    return NotImplementedError(f"{name}: {capability} not available in this version{advice}.")


def absent(capability: str, instead: str = "") -> Callable:
    """Makes a function, or a class's construction, raise NotImplementedError naming itself and `capability` ("MoE
    permutation is"), with what to do `instead`. Its signature and docstring stay as they are written, and so does what
    a class inherits. When the capability lands, the body is written and the decorator goes."""

    def mark(target: Callable) -> Callable:
        def refuse(*args, **kwargs):
            raise refusal(target.__qualname__, capability, instead)

        if not isinstance(target, type):
            refusing = functools.wraps(target)(refuse)
            refusing.absent_capability = capability
            return refusing
        target.__init__ = functools.wraps(target.__init__)(refuse)
        if issubclass(target, torch.Tensor):  # __new__ would take the arguments first
            target.__new__ = refuse
        target.absent_capability = capability
        return target

    return mark
