"""What a call passes beside tensors: it is part of the graph, so each replay has to pass the same. Keeps what is needed
to say so; refuses what cannot be compared, or would hide tensors from the graph."""

import copy
import dataclasses
import functools

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, is_numpy, shown

_HIDDEN = "holds a tensor, which the graph would go on reading where it is now"
_FIX = "pass its tensors by themselves, or in a dict"


def _inside(value: object) -> list[object]:
    """What a value holds that is no node of torch's trees: its attributes, a set's elements, a partial's arguments."""
    if isinstance(value, torch.nn.Module | type) or is_numpy(value):
        return []
    held = list(value) if isinstance(value, set | frozenset) else []
    if isinstance(value, functools.partial):
        held += [value.args, value.keywords]
    if dataclasses.is_dataclass(value):
        held += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return pytree.tree_leaves([held, dict(getattr(value, "__dict__", {}))])


def kept(value: object, name: str) -> object:
    """What the argument `name` of each replay is compared with: of a value that may be changed in place a copy, an
    object that is equal to itself alone is that object.

    Errors: ValueError where it holds a tensor, or does not say whether it is equal to another."""
    if type(value) is tuple:
        return tuple(kept(part, f"{name}[{i}]") for i, part in enumerate(value))
    if any(isinstance(held, torch.Tensor) for held in _inside(value)):
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
        raise ValueError(_incomparable(value, name, f"gives {shown(answer)}"))
    return own


def _incomparable(value: object, name: str, answer: str) -> str:
    return (
        f"{OP}: 'sample_kwargs': {name} is a {type(value).__name__}, part of the graph, so each replay has to pass an "
        f"equal one; but comparing it with its copy {answer}. Pass what can be compared, or bind it with a lambda."
    )


def same(given: object, own: object) -> bool:
    """Whether a replay passes what was captured. A nan is the same as a nan; 1, 1.0 and True are three values."""
    if given is own:
        return True
    if type(given) is not type(own):
        return False
    if type(own) is tuple:
        return len(given) == len(own) and all(map(same, given, own))
    if is_numpy(own):
        return given.dtype == own.dtype and given.shape == own.shape and given.tobytes() == own.tobytes()
    if isinstance(own, float | complex):
        return given == own or repr(given) == repr(own)
    try:
        return (given == own) is True
    except Exception:
        return False
