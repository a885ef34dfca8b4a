"""Checks of constructor arguments that several modules take. Nothing is built here."""

import operator


def check_size(op: str, argument: str, size: object, least: int = 0) -> None:
    """Raises unless `size` is an integer (numpy's too) of at least `least`."""
    try:
        fits = operator.index(size) >= least
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: argument '{argument}' is {size!r}, wanted an integer of at least {least}.")
