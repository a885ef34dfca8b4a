"""Arguments other than tensors are constants of the graph: a replay has to pass equal values.

- A copy is kept for the comparison.
- Values that cannot be compared, or that hide tensors from the graph, are refused at the capture.
"""

import copy
import dataclasses
import functools

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, is_numpy, short_repr

_HIDDEN = "holds a tensor, which the graph would always read at its present address"
_FIX = "pass its tensors directly, or in a dict"


def _contents(value: object) -> list[object]:
    """The contents of a value that torch's pytree does not see: attributes, elements of a set, arguments of a
    partial."""
    if isinstance(value, torch.nn.Module | type) or is_numpy(value):
        return []
    contents = list(value) if isinstance(value, set | frozenset) else []
    if isinstance(value, functools.partial):
        contents += [value.args, value.keywords]
    if dataclasses.is_dataclass(value):
        contents += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return pytree.tree_leaves([contents, dict(getattr(value, "__dict__", {}))])


def comparable_copy(value: object, name: str) -> object:
    """The value that the argument `name` of each replay is compared with: a copy if it is mutable; an object that is
    compared by identity stays the same object.

    Errors: ValueError if it holds a tensor, or cannot be compared."""
    if type(value) is tuple:
        return tuple(comparable_copy(part, f"{name}[{i}]") for i, part in enumerate(value))
    if any(isinstance(part, torch.Tensor) for part in _contents(value)):
        raise ValueError(f"{OP}: 'sample_kwargs': {name} is a {type(value).__name__} that {_HIDDEN}; {_FIX}.")
    if is_numpy(value):
        if value.dtype.hasobject:
            raise ValueError(
                f"{OP}: 'sample_kwargs': {name} is an array of objects, which cannot be compared at a replay; pass a "
                "list of them."
            )
        return value.copy()
    if type(value).__eq__ is object.__eq__ or isinstance(value, float | complex):
        return value
    try:
        mutable = type(value).__hash__ is None
        own = copy.deepcopy(value) if mutable else value
        answer = own == value
    except Exception as error:
        raise ValueError(_incomparable(value, name, f"raises {type(error).__name__}: {error}")) from error
    if answer is not True:
        raise ValueError(_incomparable(value, name, f"gives {short_repr(answer)}"))
    return own


def _incomparable(value: object, name: str, answer: str) -> str:
    return (
        f"{OP}: 'sample_kwargs': {name} is a {type(value).__name__}, part of the graph, so each replay has to pass an "
        f"equal one; but comparing it with its copy {answer}. Pass a value that can be compared, or bind it with a "
        "lambda."
    )


def equal_constants(given: object, own: object) -> bool:
    """Whether a replay passes the captured value. A nan equals a nan; 1, 1.0 and True are different values."""
    if given is own:
        return True
    if type(given) is not type(own):
        return False
    if type(own) is tuple:
        return len(given) == len(own) and all(map(equal_constants, given, own))
    if is_numpy(own):
        return given.dtype == own.dtype and given.shape == own.shape and given.tobytes() == own.tobytes()
    if isinstance(own, float | complex):
        return given == own or repr(given) == repr(own)
    try:
        return (given == own) is True
    except Exception:
        return False
