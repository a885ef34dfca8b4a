"""Checks of arguments that the parts of offload share: each names the call, the argument, what it got and what it
wanted. No state is known here."""

import torch


def is_count(value: object) -> bool:
    """An int, and not a truth value that was put in its place."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_flags(op: str, **flags: object) -> None:
    """0, 1 and None are taken for truth values, as a program's options come; other things are a mistake."""
    for name, value in flags.items():
        if not (value is None or (isinstance(value, int) and value in (0, 1))):
            raise TypeError(f"{op}: argument '{name}' is {value!r:.100}, wanted True or False.")


def check_stream(op: str, stream: object) -> None:
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            f"{op}: argument 'offload_stream' is a {type(stream).__name__}, wanted a torch.cuda.Stream, or None for "
            "streams of its own."
        )


def check_bytes(op: str, nbytes: object, device: torch.device) -> None:
    if not is_count(nbytes) or not 0 <= nbytes < 2**63:
        raise ValueError(f"{op}: argument 'nbytes' is {nbytes!r:.100}, wanted a number of bytes, an int from 0 on.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: argument 'device' is {device}, wanted 'cuda' or 'cpu'.")
