"""Parameters that stack several parts, each of which is cut over the ranks by itself. Modules with such parameters
register them here; this file imports no module."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class Stack(NamedTuple):
    """owner: the module with these parameters. shares: of the rows of each, by the name of the part, in order."""

    owner: torch.nn.Module
    parameters: tuple[str, ...]
    shares: dict[str, int]


_registered: dict[type, Callable[[torch.nn.Module], Iterator[Stack]]] = {}


def register_stacks(kind: type) -> Callable:
    """Decorates a function that returns the stacks of a module of that class."""

    def register(stacks: Callable[[torch.nn.Module], Iterator[Stack]]) -> Callable:
        _registered[kind] = stacks
        return stacks

    return register


def stacks_of(module: torch.nn.Module) -> Iterator[Stack]:
    """The stacks of the module; those of its submodules only if the module's own function returns them."""
    for kind, stacks in _registered.items():
        if isinstance(module, kind):
            yield from stacks(module)
