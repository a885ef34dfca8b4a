"""The interface of a backend that captures and replays graphs; cuda.py and cpu.py implement it.

- Each backend has types of its own for streams, events and graphs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Written = Sequence[torch.Tensor | None]


class HostSync(RuntimeError):
    """The captured code has an operation that waits for the device."""


class Graph(Protocol):
    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Backend(Protocol):
    """Graphs of one set of callables on one device, all in one memory pool."""

    def session(self) -> AbstractContextManager[None]:
        """Around warm-up and captures."""

    def warmup(self) -> AbstractContextManager[None]:
        """Around the warm-up."""

    def prepare(self, *, warmed: bool) -> None:
        """Before the captures."""

    def capture(
        self, func: Callable[[], Written], *, private_pool: bool = False
    ) -> tuple[Graph, list[torch.Tensor | None], frozenset]:
        """The graph, the static tensors that it writes, and the events that it records after its results for work
        outside of it. private_pool: the graph may be replayed at any time, so no other graph may use its memory."""

    def release(self, tensors: Written, *, private_pool: bool = False) -> list[torch.Tensor | None]:
        """Releases the memory of static tensors: later captures may write there."""

    def replay_of(self, graph: Graph) -> Callable[[], None]:
        """A function that replays the graph with the least Python overhead."""

    def current_stream(self) -> object: ...

    def is_stream(self, stream: object) -> bool: ...

    def is_event(self, event: object) -> bool: ...

    def handle_of(self, event: object) -> object:
        """The handle by which capture() lists the event."""

    def on(self, stream: object) -> AbstractContextManager: ...
