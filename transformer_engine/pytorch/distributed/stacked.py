"""Parameters that stack several, each of which is cut over the ranks by itself. The modules that have such tell it
here, each from a file of its own; no module is known."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class Stack(NamedTuple):
    """owner: whose parameters these are. shares: of the rows of each, by the name of the part, in their order."""

    owner: torch.nn.Module
    parameters: tuple[str, ...]
    shares: dict[str, int]


_told: dict[type, Callable[[torch.nn.Module], Iterator[Stack]]] = {}


def tells_stacks(kind: type) -> Callable:
    """Around a function that gives the stacks of a module of that class."""

    def tell(stacks: Callable[[torch.nn.Module], Iterator[Stack]]) -> Callable:
        _told[kind] = stacks
        return stacks

    return tell


def stacks_of(module: torch.nn.Module) -> Iterator[Stack]:
    """Of the module, those of its submodules only where it says so itself."""
    for kind, stacks in _told.items():
        if isinstance(module, kind):
            yield from stacks(module)
