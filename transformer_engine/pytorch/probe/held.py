"""Finds the tensors that an autograd graph holds without saving them, for te.memory_plan.

- Objects that saved-tensor hooks inside of the module packed.
- Tensors of functions that run in the backward: those of checkpoints and of hooks.
- Tensors on the ctx of autograd functions.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from transformer_engine.pytorch.distributed.rng import Snapshot

_CONTAINERS = list, tuple, set, frozenset, deque


class Inner:
    """The result of a pack hook inside of the module; it lives as long as the graph holds it. unpack: the unpack hook,
    which may hold tensors too. device: of the saved tensor."""

    __slots__ = ("__weakref__", "device", "module", "packed", "unpack")

    def __init__(self, module: str, tensor: torch.Tensor, packed: object, unpack: Callable) -> None:
        self.module, self.packed, self.unpack = module, packed, unpack
        self.device = tensor.device


@contextmanager
def inner_hooks_seen(label: Callable[[], str]) -> Iterator[list[weakref.ref[Inner]]]:
    """Yields a list of the objects that hooks packed which this thread enters inside. torch calls only the innermost
    hooks, so hooks around them cannot see these tensors."""
    seen: list[weakref.ref[Inner]] = []
    thread, enter = threading.get_ident(), saved_tensors_hooks.__enter__

    def watched(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() != thread:
            return enter(hooks)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def pack_and_record(t: torch.Tensor) -> Inner:
            inner = Inner(label(), t, pack(t), unpack)
            seen.append(weakref.ref(inner))
            return inner

        return enter(saved_tensors_hooks(pack_and_record, lambda inner: unpack(inner.packed)))

    saved_tensors_hooks.__enter__ = watched
    try:
        yield seen
    finally:
        saved_tensors_hooks.__enter__ = enter


class Held(NamedTuple):
    """A tensor that an object holds, and its name there."""

    name: str
    tensor: torch.Tensor


def held_by(name: str, root: object) -> list[Held]:
    """The tensors that a function, a container or a packed object holds, except those of modules, trackers and other
    objects that live independently of the graph."""
    found, seen, todo = [], set(), [(name, root)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(Held(name, value))
        else:
            todo += _contents(name, value, value is root)
    return found


def _contents(name: str, value: object, any_class: bool) -> Iterable[tuple[str, object]]:
    """The contents of a value, with names. any_class: inspect an object of any class."""
    if isinstance(value, (torch.nn.Module, type)) or hasattr(value, "get_states"):
        return ()
    if isinstance(value, Mapping):
        return [(name, part) for part in value.values()]
    if isinstance(value, _CONTAINERS):
        return [(name, part) for part in value]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        given = [(name, part) for part in value.__defaults__ or ()] + list((value.__kwdefaults__ or {}).items())
        return given + [(variable, cell.cell_contents) for variable, cell in cells if _is_set(cell)]
    if isinstance(value, MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    if isinstance(value, partial):
        return [(name, value.func), (name, value.args), *value.keywords.items()]
    if isinstance(value, Snapshot):
        return [("random state", part) for part in vars(value).values()]
    if any_class or type(value).__module__.startswith(("torch.utils.checkpoint", "transformer_engine.")):
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        own = {slot: getattr(value, slot) for slot in slots if slot != "__weakref__" and hasattr(value, slot)}
        return (own | getattr(value, "__dict__", {})).items()
    return ()


def _is_set(cell: object) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
