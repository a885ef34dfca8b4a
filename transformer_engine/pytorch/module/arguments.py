"""Checks of arguments that several modules take. Nothing is built here."""

import operator
import re

import torch


def check_size(op: str, argument: str, size: object, least: int = 0) -> None:
    """Raises unless `size` is an integer (numpy's too) of at least `least`."""
    try:
        fits = operator.index(size) >= least
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: argument '{argument}' is {size!r}, wanted an integer of at least {least}.")


def check_function(op: str, argument: str, value: object) -> None:
    """Raises unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(f"{op}: argument '{argument}' is {value!r}, wanted a function or None.")


def check_tensor(op: str, argument: str, value: object) -> None:
    """Raises unless `value` is a tensor. Callers ask first whether its type is torch.Tensor, which costs less."""
    if isinstance(value, torch.Tensor):
        return
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    advice = "; torch.from_numpy(...) shares its memory" if name == "numpy.ndarray" else ""
    raise TypeError(f"{op}: argument '{argument}' is a {name}, wanted a torch.Tensor{advice}.")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def refuse_misfit(
    op: str, argument: str, value: torch.Tensor | None, width: int, name: str, parameter: torch.Tensor, **how: bool
) -> None:
    """Raises, in the words of who called a module, where `value` does not fit `parameter`, which is called `name`. For
    a call that the extension has refused already: its checks know no module, and cost less than these. how: as
    _misfit's last arguments."""
    words = None if value is None else _misfit(value, width, name, parameter, **how)
    if words is not None:
        raise ValueError(f"{op}: argument '{argument}' {words}.") from None


def _misfit(
    value: torch.Tensor, width: int, name: str, parameter: torch.Tensor, *, same_dtype: bool = True
) -> str | None:
    if value.dim() == 0 or value.shape[-1] != width:
        found = f"last dimension {value.shape[-1]}" if value.dim() else "no dimensions"
        return f"has {found}, wanted {width}; its shape is {list(value.shape)}"
    if value.device != parameter.device:
        return f"is on {value.device}, wanted {parameter.device} like '{name}'; move one of them with .to(device)"
    if value.dtype not in _DTYPES:
        return f"has dtype {value.dtype}, wanted float32, float16 or bfloat16; cast it with .to(dtype)"
    if same_dtype and value.dtype != parameter.dtype and not torch.is_autocast_enabled(value.device.type):
        return (
            f"has dtype {value.dtype}, but '{name}' has {parameter.dtype}; cast one of them, or run under "
            "torch.autocast"
        )
    return None


_PARAMETERS = {"gamma": "layer_norm_weight", "beta": "layer_norm_bias", "x": "inp"}
_SENTENCE = re.compile(r"(?:linear|normalization|activation|quantize|gemm\w*): argument '(\w+)' ")


def retold(op: str, error: ValueError) -> ValueError:
    """An inner op's refusal of an argument, in the words of who called the module; any other error as it is."""
    found = _SENTENCE.match(str(error))
    if found is None:
        return error
    name = _PARAMETERS.get(found[1], found[1])
    return ValueError(f"{op}: argument '{name}' {str(error)[found.end() :]}")
