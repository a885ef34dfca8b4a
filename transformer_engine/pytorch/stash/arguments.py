"""Checks of the arguments that users pass to a PagedStash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch

from transformer_engine.pytorch import _C

OP = "PagedStash"
POLICIES = {"ring": 0, "stack": 1, "bump": 2}  # te_stash_policy
TAILS = _C.stash_tails
MAX_TENSORS = _C.stash_max_tensors
OVERFLOWS = ("spill", "raise_at_step_end", "trap")
_INTEGERS = (torch.uint8, torch.int32, torch.int64)


def check_options(options: dict[str, object]) -> None:
    def count(name: str, least: int, wanted: str) -> int:
        value = options[name]
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{OP}: argument '{name}' is {value!r:.100}, wanted {wanted}.")
        return int(value)

    if count("page_bytes", 1, "a multiple of 128 bytes") % 128:
        raise ValueError(f"{OP}: argument 'page_bytes' is {options['page_bytes']}, wanted a multiple of 128 bytes.")
    if options["device_pages"] is not None:
        count("device_pages", 0, "a number of pages, or None to size the pool by the first step")
    count("host_pages", 0, "a number of pages")
    count("sm_budget", 1, "a number of blocks of 1 or more")
    count("low_water", 0, "a number of pages")
    factor = options["factor"]
    if not isinstance(factor, Real) or isinstance(factor, bool) or not math.isfinite(factor) or factor <= 0:
        raise ValueError(f"{OP}: argument 'factor' is {factor!r:.100}, wanted a number above 0.")
    for name, allowed in (("policy", tuple(POLICIES)), ("overflow", OVERFLOWS)):
        if options[name] not in allowed:
            raise ValueError(f"{OP}: argument '{name}' is {options[name]!r:.100}, wanted one of {allowed}.")
    if not isinstance(options["debug"], bool):
        raise ValueError(f"{OP}: argument 'debug' is {options['debug']!r:.100}, wanted a bool.")
    if options["low_water"] and (options["policy"] == "bump" or not options["host_pages"]):
        raise ValueError(
            f"{OP}: argument 'low_water' is {options['low_water']} with policy {options['policy']!r} and "
            f"{options['host_pages']} host pages, wanted 0; to evict groups, pass host_pages and policy 'ring' or "
            "'stack'."
        )


def checked_device(device: torch.device | str | None) -> torch.device:
    """The device, with an index on CUDA. None is the current CUDA device where there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{OP}: argument 'device' is {device}, wanted a CPU or CUDA device.")
    if device.type == "cpu":
        return torch.device("cpu")  # without an index, as in the `device` of a tensor
    found = torch.cuda.device_count()
    if (device.index or 0) >= found:
        raise ValueError(
            f"{OP}: argument 'device' is {device}, but torch finds {found} CUDA devices; pass one of these, or 'cpu'."
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def check_counter(call: str, counter: object, device: torch.device) -> None:
    if not isinstance(counter, torch.Tensor):
        raise TypeError(f"{OP}.{call}: argument 'counts' is a {type(counter).__name__}, wanted a tensor on {device}.")
    if counter.dtype not in _INTEGERS or counter.numel() != 1 or counter.device != device:
        raise ValueError(
            f"{OP}.{call}: argument 'counts' is {counter.dtype} {list(counter.shape)} on {counter.device}, wanted one "
            f"integer (int32 or int64) on {device}."
        )


def check_name(call: str, name: object) -> None:
    """The name has to be a key of a dict."""
    try:
        hash(name)
    except TypeError:
        raise TypeError(
            f"{OP}.{call}: the group's name is a {type(name).__name__}, wanted a name that can be hashed, such as a "
            "str or an int."
        ) from None


def check_tail(call: str, tail: object) -> None:
    if tail not in TAILS:
        raise ValueError(f"{OP}.{call}: argument 'tail' is {tail!r:.100}, wanted one of {tuple(TAILS)}.")


def check_tensors(
    tensors: Sequence[torch.Tensor], counts: object, unit_rows: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a tensor and its counter."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence) or not tensors:
        raise TypeError(f"{OP}.stash: argument 'tensors' is a {type(tensors).__name__}, wanted a list of tensors.")
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"{OP}.stash: argument 'tensors' has {len(tensors)}, wanted at most {MAX_TENSORS}.")
    if not isinstance(unit_rows, Integral) or isinstance(unit_rows, bool) or unit_rows < 1:
        raise ValueError(f"{OP}.stash: argument 'unit_rows' is {unit_rows!r:.100}, wanted an int of 1 or more.")
    if not isinstance(counts, Sequence):
        check_counter("stash", counts, device)
    counters = list(counts) if isinstance(counts, Sequence) else [counts] * len(tensors)
    if len(counters) != len(tensors):
        raise ValueError(
            f"{OP}.stash: argument 'counts' has {len(counters)} counters for {len(tensors)} tensors, wanted one for "
            "all tensors or one each."
        )
    for i, (tensor, counter) in enumerate(zip(tensors, counters, strict=True)):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{OP}.stash: argument 'tensors'[{i}] is a {type(tensor).__name__}, wanted a plain torch.Tensor; pass "
                "the parts of a quantized tensor."
            )
        if tensor.device != device:
            raise ValueError(
                f"{OP}.stash: argument 'tensors'[{i}] is on {tensor.device}, wanted {device}, the pool's device."
            )
        if tensor.ndim == 0 or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            raise ValueError(
                f"{OP}.stash: argument 'tensors'[{i}] has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, wanted a contiguous tensor with a first dimension, so that its live rows "
                "are the first bytes of its memory; pass contiguous()."
            )
        if tensor.shape[0] % unit_rows:
            raise ValueError(
                f"{OP}.stash: argument 'tensors'[{i}] has {tensor.shape[0]} rows, wanted a multiple of 'unit_rows', "
                f"{unit_rows}."
            )
        check_counter("stash", counter, device)
    return list(zip(tensors, counters, strict=True))
