"""Whether a capture is under way in this thread: by the flag that this library's captures, and clients' own, set around
warm-up and capture, and by the stream itself. Nothing is captured here."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch import _C


class _ThreadState(threading.local):
    def __init__(self) -> None:  # torch.compile does not see class attributes
        self.capturing = False


_thread = _ThreadState()
_threads: set[int] = set()  # that capture: if it is empty, no backward belongs to a capture


def set_capture_start() -> None:
    """Marks the beginning of a capture in this thread; the warm-up counts as part of it, and so do the backwards that
    this thread calls."""
    _thread.capturing = True
    _threads.add(_C.this_thread())


def set_capture_end() -> None:
    """Marks the end of a capture."""
    _thread.capturing = False
    _threads.discard(_C.this_thread())


def is_graph_capturing() -> bool:
    """Whether this thread captures callables, warm-up included: a module may then skip work that only eager needs."""
    if _thread.capturing or torch.compiler.is_compiling() or not _threads:
        return _thread.capturing
    return _C.calling_thread() in _threads


def stream_captures() -> bool:
    """Whether the current stream is being captured, by any caller. It does not initialise CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def as_captured() -> Iterator[None]:
    """Inside, modules behave as in a capture; replays on a CPU run like that."""
    before, _thread.capturing = _thread.capturing, True
    try:
        yield
    finally:
        _thread.capturing = before
