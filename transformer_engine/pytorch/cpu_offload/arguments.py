"""Argument checks shared by the parts of CPU offload; each error names the call, the argument, got and wanted."""

import torch


def is_int(value: object) -> bool:
    """Whether it is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_flags(op: str, **flags: object) -> None:
    """0, 1 and None are accepted as bools, as options of programs often are; other values are an error."""
    for name, value in flags.items():
        if not (value is None or (isinstance(value, int) and value in (0, 1))):
            raise TypeError(f"{op}: argument '{name}' is {value!r:.100}, wanted True or False.")


def check_stream(op: str, stream: object) -> None:
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            f"{op}: argument 'offload_stream' is a {type(stream).__name__}, wanted a torch.cuda.Stream, or None for "
            "separate streams."
        )


def check_bytes(op: str, nbytes: object, device: torch.device) -> None:
    if not is_int(nbytes) or not 0 <= nbytes < 2**63:
        raise ValueError(f"{op}: argument 'nbytes' is {nbytes!r:.100}, wanted a number of bytes, an int from 0 up.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: argument 'device' is {device}, wanted 'cuda' or 'cpu'.")
