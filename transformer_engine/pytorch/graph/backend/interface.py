"""What captures and replays ask of a machine: cuda.py has it of CUDA, cpu.py stands in. Streams, events and graphs are
whatever the machine has."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Written = Sequence[torch.Tensor | None]


class HostSync(RuntimeError):
    """An operation that waits for the device stands in what is captured."""


class Graph(Protocol):
    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Backend(Protocol):
    """Graphs of one set of callables on one device, all in one memory pool."""

    def session(self) -> AbstractContextManager[None]:
        """Around warm-up and captures."""

    def warming(self) -> AbstractContextManager[None]:
        """Around the warm-up."""

    def prepare(self, *, warmed: bool) -> None:
        """Before the captures."""

    def capture(
        self, work: Callable[[], Written], *, apart: bool = False
    ) -> tuple[Graph, list[torch.Tensor | None], frozenset]:
        """The graph, the static tensors that it writes, and the events that it records for work outside of it.
        `apart`: a graph that may be replayed at any time, whose memory no other one may have."""

    def release(self, tensors: Written, *, apart: bool = False) -> list[torch.Tensor | None]:
        """Gives the memory of static tensors back: captures from here on may write there."""

    def replay_of(self, graph: Graph) -> Callable[[], None]:
        """Its replay, with as little of Python as there can be."""

    def current_stream(self) -> object: ...

    def is_stream(self, stream: object) -> bool: ...

    def is_event(self, event: object) -> bool: ...

    def handle_of(self, event: object) -> object:
        """By which capture() lists it."""

    def on(self, stream: object) -> AbstractContextManager: ...
