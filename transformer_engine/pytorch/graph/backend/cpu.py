"""What stands in for CUDA graphs on a machine without CUDA: the same static tensors, written by calling the eager work
again. It makes nothing faster; it lets schedules, buffers, hooks and refusals run anywhere."""

import collections
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from transformer_engine.pytorch.graph.backend.interface import HostSync, Written
from transformer_engine.pytorch.graph.memory.buffers import Buffers, distinct

# What asks a device for a value or for a size that depends on values: a graph cannot.
_VALUES = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_SIZES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero"}


class _RefuseWaiting(TorchFunctionMode):
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
    """Stands for a stream: says in its log what waits for what, in the order of the calls."""

    def __init__(self, name: str, log: collections.deque | None = None) -> None:
        self.name, self.log = name, collections.deque(maxlen=256) if log is None else log

    def wait_stream(self, other: "RecordedStream") -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: object) -> None:
        self.log.append((self.name, "waits for event", event))


_main = RecordedStream("main")


class _Here(threading.local):
    recorded: "set[RecordedEvent] | None" = None  # by the capture under way in this thread


_here = _Here()


class RecordedEvent:
    """Stands for a torch.cuda.Event(external=True): a capture notes that it is recorded."""

    def record(self, stream: RecordedStream | None = None) -> None:
        if _here.recorded is not None:
            _here.recorded.add(self)


def _write(static: Written, tensors: Written) -> None:
    for target, tensor in zip(static, tensors, strict=True):
        if target is not None:
            distinct(target.data).copy_(distinct(tensor.detach()))  # uncounted by torch, as a graph's writes are


class RecordedGraph:
    """Work and the static tensors that it writes."""

    def __init__(self, work: Callable[[], Written], static: Written) -> None:
        self.work, self.static = work, static

    def replay(self) -> None:
        _write(self.static, self.work())

    def reset(self) -> None:
        self.work, self.static = None, ()


class CpuGraphs:
    """As CudaGraphs. Static tensors that died are given out again, as a graph pool's memory is."""

    def __init__(self) -> None:
        self.buffers, self.apart = Buffers(), Buffers()
        self._running = _main

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    def prepare(self, *, warmed: bool) -> None:
        pass

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def capture(
        self, work: Callable[[], Written], *, apart: bool = False
    ) -> tuple[RecordedGraph, list[torch.Tensor | None], frozenset[RecordedEvent]]:
        buffers, events = self.apart if apart else self.buffers, set()
        _here.recorded = events
        try:
            with _RefuseWaiting():
                written = work()
        finally:
            _here.recorded = None
        static = [None if tensor is None else buffers.take(tensor) for tensor in written]
        _write(static, written)
        return RecordedGraph(work, static), static, frozenset(events)

    def release(self, tensors: Written, *, apart: bool = False) -> list[torch.Tensor | None]:
        """These static tensors are dead once the captures so far have been replayed; replay goes on using them."""
        for tensor in tensors:
            (self.apart if apart else self.buffers).give(tensor)
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
