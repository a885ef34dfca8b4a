"""Whether a capture is under way: by the flag that our captures, and clients' own, set around warm-up and capture, and
by the stream itself. Modules and helpers ask; nothing is captured here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_capturing = False


def set_capture_start() -> None:
    """Tells the modules that a capture begins; its warm-up counts as part of it."""
    global _capturing
    _capturing = True


def set_capture_end() -> None:
    """Tells the modules that a capture has ended."""
    global _capturing
    _capturing = False


def is_graph_capturing() -> bool:
    """Whether callables are being captured, warm-up included: a module may then leave out what only eager needs."""
    return _capturing


def stream_captures() -> bool:
    """Whether the current stream is being captured, by whomever; CUDA is not started to ask."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_followers: list[tuple[Callable[[], None], Callable[[], None]]] = []


def follow_captures(pass_ended: Callable[[], None], capture_ends: Callable[[], None]) -> None:
    """For what has steps, and streams of its own. pass_ended: called behind each pass of a warm-up over all that is
    captured, which is a step; capture_ends: before the capture of each graph ends, which has to join streams."""
    _followers.append((pass_ended, capture_ends))


def pass_ended() -> None:
    for call, _ in _followers:
        call()


def capture_ends() -> None:
    for _, call in _followers:
        call()


@contextmanager
def as_captured() -> Iterator[None]:
    """Inside, modules do what they do in a capture; so run a CPU's replays."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before
