"""Checks of arguments that several folders share. Nothing is built here."""

import math
import operator
from collections.abc import Callable
from numbers import Real

import torch


def check_size(op: str, argument: str, size: object, least: int = 0) -> None:
    """Raises unless `size` is an integer (numpy's too) of at least `least`."""
    try:
        fits = operator.index(size) >= least
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: argument '{argument}' is {size!r}, wanted an integer of at least {least}.")


def check_integer(op: str, argument: str, value: object) -> None:
    """Raises unless `value` is an integer (numpy's too)."""
    try:
        operator.index(value)
    except TypeError:
        raise ValueError(f"{op}: argument '{argument}' is {value!r:.100}, wanted an integer.") from None


def check_number(
    op: str,
    argument: str,
    value: object,
    wanted: str = "a finite number",
    fits: Callable[[float], bool] = math.isfinite,
) -> float:
    """`value` as a float. Raises unless it is a finite number (numpy's too) for which `fits` holds; a traced one is
    left to the op."""
    if torch.compiler.is_compiling():  # Dynamo has no numbers.Real
        return float(value)
    if not isinstance(value, Real) or isinstance(value, bool) or not (math.isfinite(value) and fits(value)):
        raise ValueError(f"{op}: argument '{argument}' is {value!r:.100}, wanted {wanted}.")
    return float(value)


def check_function(op: str, argument: str, value: object) -> None:
    """Raises unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{op}: argument '{argument}' is {value!r}, wanted a function or None.")


def check_tensor(op: str, argument: str, value: object) -> None:
    """Raises unless `value` is a tensor. Callers first compare its type with torch.Tensor, which costs less."""
    if isinstance(value, torch.Tensor):
        return
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    advice = "; torch.from_numpy(...) shares its memory" if name == "numpy.ndarray" else ""
    raise TypeError(f"{op}: argument '{argument}' is a {name}, wanted a torch.Tensor{advice}.")
