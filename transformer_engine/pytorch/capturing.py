"""Whether callables are being captured in CUDA graphs: the flag that modules and helpers ask, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def as_captured() -> Iterator[None]:
    """Inside, modules do what they do in a capture; a recorder's replays run so."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before
