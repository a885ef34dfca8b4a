"""Whether a capture is under way in this thread: by the flag that this library's captures, and clients' own, set around
warm-up and capture, and by the stream itself. Nothing is captured here."""

import threading
from collections.abc import Callable, Iterator
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


_followers: list[tuple[Callable[[], None], Callable[[], None]]] = []


def follow_captures(pass_ended: Callable[[], None], capture_ends: Callable[[], None]) -> None:
    """For code that has steps, and streams of its own. pass_ended: called after each pass of a warm-up over all
    captured callables, which is a step; capture_ends: before the capture of each graph ends, which must join
    streams."""
    _followers.append((pass_ended, capture_ends))


def pass_ended() -> None:
    for call, _ in _followers:
        call()


def capture_ends() -> None:
    for _, call in _followers:
        call()


@contextmanager
def as_captured() -> Iterator[None]:
    """Inside, modules behave as in a capture; replays on a CPU run like that."""
    before, _thread.capturing = _thread.capturing, True
    try:
        yield
    finally:
        _thread.capturing = before
