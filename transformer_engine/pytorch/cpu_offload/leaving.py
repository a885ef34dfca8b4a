"""How many layers have started to leave for the host, ever: what a capture asks before and behind it, since copies that
were made in it are part of its graphs. Moves nothing."""

from collections import Counter

from transformer_engine.pytorch import _C

_left: Counter[int] = Counter()  # by the threads that called for it: others train beside a capture


def note_leaving() -> None:
    """A layer has started to leave."""
    _left[_C.calling_thread()] += 1


def layers_that_left() -> int:
    """How many so far in this thread: those of a capture are the difference."""
    return _left[_C.this_thread()]
