"""Replaces CUDA graphs on a machine without CUDA: a replay calls the eager function and writes the static tensors.

- It makes nothing faster; schedules, buffers, hooks and refusals run as on CUDA.
"""

import collections
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from transformer_engine.pytorch.graph.backend.interface import HostSync, Written
from transformer_engine.pytorch.graph.memory.buffers import BufferPool, unexpanded
from transformer_engine.pytorch.graph.observers import capture_ends, events_of_capture

# Operations that read a value, or a size that depends on values, from the device; a graph cannot contain them.
_VALUES = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_SIZES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero"}


class _RefuseHostSync(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        mask = name == "__getitem__" and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
            for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in _VALUES or name in _SIZES or mask:
            frame = sys._getframe(1)
            where = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            raise HostSync(f"'{name}' waits for the device, in `{where}` ({frame.f_code.co_name})")
        return func(*args, **(kwargs or {}))


class RecordedStream:
    """Represents a stream: logs each wait, in the order of the calls."""

    def __init__(self, name: str, log: collections.deque | None = None) -> None:
        self.name, self.log = name, collections.deque(maxlen=256) if log is None else log

    def wait_stream(self, other: "RecordedStream") -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: object) -> None:
        self.log.append((self.name, "waits for event", event))


_main = RecordedStream("main")


class _ThreadState(threading.local):
    recorded: "list[RecordedEvent] | None" = None  # events recorded by the present capture of this thread


_thread = _ThreadState()


class RecordedEvent:
    """Represents a torch.cuda.Event(external=True): a capture lists the events that were recorded."""

    def record(self, stream: RecordedStream | None = None) -> None:
        if _thread.recorded is not None:
            _thread.recorded.append(self)


def _write(static: Written, tensors: Written) -> None:
    for target, tensor in zip(static, tensors, strict=True):
        if target is not None:
            unexpanded(target.data).copy_(
                unexpanded(tensor.detach())
            )  # without a version bump, like the writes of a graph


class RecordedGraph:
    """A function and the static tensors that its results are written to."""

    def __init__(self, func: Callable[[], Written], static: Written) -> None:
        self.func, self.static = func, static

    def replay(self) -> None:
        _write(self.static, self.func())

    def reset(self) -> None:
        self.func, self.static = None, ()


class CpuGraphs:
    """As CudaGraphs. Released static tensors are reused, like the memory of a graph pool."""

    def __init__(self) -> None:
        self.pool, self.private_pool = BufferPool(), BufferPool()
        self._running = _main

    @contextmanager
    def warmup(self) -> Iterator[None]:
        yield

    def prepare(self, *, warmed: bool) -> None:
        pass

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def capture(
        self, func: Callable[[], Written], *, private_pool: bool = False
    ) -> tuple[RecordedGraph, list[torch.Tensor | None], frozenset[RecordedEvent]]:
        pool, recorded = self.private_pool if private_pool else self.pool, []
        _thread.recorded = recorded
        try:
            with _RefuseHostSync(), events_of_capture(lambda: recorded) as events:
                written = func()
                capture_ends()
        finally:
            _thread.recorded = None
        static = [None if tensor is None else pool.acquire(tensor) for tensor in written]
        _write(static, written)
        return RecordedGraph(func, static), static, events.after_results()

    def release(self, tensors: Written, *, private_pool: bool = False) -> list[torch.Tensor | None]:
        """The memory of these static tensors may be reused by later captures; replays still write them."""
        for tensor in tensors:
            (self.private_pool if private_pool else self.pool).release(tensor)
        return list(tensors)

    @staticmethod
    def replay_of(graph: RecordedGraph) -> Callable[[], None]:
        return graph.replay

    def current_stream(self) -> RecordedStream:
        return self._running

    @staticmethod
    def is_stream(stream: object) -> bool:
        return isinstance(stream, RecordedStream)

    @staticmethod
    def is_event(event: object) -> bool:
        return isinstance(event, RecordedEvent)

    @staticmethod
    def handle_of(event: RecordedEvent) -> RecordedEvent:
        return event

    @contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        before, self._running = self._running, stream
        try:
            yield
        finally:
            self._running = before
