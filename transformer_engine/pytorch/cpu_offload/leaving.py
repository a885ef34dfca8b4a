"""How many layers have started to leave for the host, ever: what a capture asks before and behind it, since copies that
were made in it are part of its graphs. Moves nothing."""

_left = 0


def note_leaving() -> None:
    """A layer has started to leave."""
    global _left
    _left += 1


def layers_that_left() -> int:
    """How many so far: those of a capture are the difference."""
    return _left
