"""Whether callables are being captured in CUDA graphs: the flag that modules and helpers ask; and the count of layers
that leave, which captures ask. Nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_capturing = False
_left = 0


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


def note_leaving() -> None:
    """A layer has started to leave for the host: in a capture its copies become part of the graphs."""
    global _left
    _left += 1


def layers_that_left() -> int:
    """How many so far: those of a capture are the difference."""
    return _left


def stream_captures() -> bool:
    """Whether the current stream is being captured, by whomever; CUDA is not started to ask."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def as_captured() -> Iterator[None]:
    """Inside, modules do what they do in a capture; so run a CPU's replays."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before
