"""User buffers: the names by which clients announce the tensors of tensor-parallel communication. Modules allocate
their own memory; the announcement is checked and stored, and channels to peers size their memory by it at their first
call (distributed/peer.py)."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch import _C

_OP = "initialize_ub"
_BACKENDS = (None, "gloo", "nccl", "mpi")


class UserBufferQuantizationMode(Enum):
    """The data in a buffer."""

    NONE = "none"
    FP8 = "fp8"


class Reservation(NamedTuple):
    """The arguments of initialize_ub: of all ranks together, [tokens, hidden]; options by layer, for each mode."""

    shape: tuple[int, int]
    tp_size: int
    dtype: torch.dtype
    options: Mapping[UserBufferQuantizationMode, Mapping[str, Mapping[str, Any]]]


_reserved: Reservation | None = None


def reservation() -> Reservation | None:
    """The arguments of the last initialize_ub; None after destroy_ub."""
    return _reserved


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict | list[dict] | None = None,
    bootstrap_backend: str | None = None,
) -> None:
    """Stores the sizes of later communication; allocates and communicates nothing, and needs no torch.distributed.
    Layers with tp_overlap="chunked" whose ranks have not met yet allocate memory of that size when they do.

    shape: [tokens of all ranks, hidden]. quantization_modes: of the buffers, by default FP8 with use_fp8 and NONE
    without. ub_cfgs: {layer: {option: value}}, one for all modes or a list of one each; options are hints, and change
    nothing here. bootstrap_backend: "gloo", "nccl", "mpi" or None; nothing is bootstrapped. A second call replaces the
    first one. Errors: ValueError, TypeError for invalid arguments; nothing is stored then.
    """
    global _reserved
    sizes = tuple(shape) if isinstance(shape, (list, tuple, torch.Size)) else ()
    if len(sizes) != 2 or not all(_is_size(n, 0) for n in sizes):
        raise ValueError(f"{_OP}: argument 'shape' is {shape!r}, wanted [tokens, hidden], two integers of at least 0.")
    if not _is_size(tp_size, 1):
        raise ValueError(f"{_OP}: argument 'tp_size' is {tp_size!r}, wanted an integer of at least 1.")
    if sizes[0] % tp_size:
        raise ValueError(
            f"{_OP}: argument 'shape' is {shape!r}, wanted tokens that tp_size {tp_size} divides; pass the tokens of "
            "all ranks together."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{_OP}: argument 'dtype' is {dtype!r}, wanted a floating-point torch.dtype.")
    if bootstrap_backend not in _BACKENDS:
        raise ValueError(f"{_OP}: argument 'bootstrap_backend' is {bootstrap_backend!r}, wanted one of {_BACKENDS}.")
    modes = _modes(use_fp8, quantization_modes)
    options = dict(zip(modes, _configurations(ub_cfgs, len(modes)), strict=True))
    _reserved = Reservation(sizes, tp_size, dtype, MappingProxyType(options))


def _is_size(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _modes(use_fp8: object, given: object) -> list[UserBufferQuantizationMode]:
    if not isinstance(use_fp8, bool):
        raise TypeError(f"{_OP}: argument 'use_fp8' is {use_fp8!r}, wanted True or False.")
    if given is None:
        return [UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE]
    modes = list(given) if isinstance(given, (list, tuple)) else []
    known = all(isinstance(mode, UserBufferQuantizationMode) for mode in modes)
    if not modes or not known or len(set(modes)) < len(modes):
        raise ValueError(
            f"{_OP}: argument 'quantization_modes' is {given!r}, wanted a list of different UserBufferQuantizationMode."
        )
    return modes


def _configurations(given: object, modes: int) -> list[Mapping[str, Mapping[str, Any]]]:
    each = list(given) if isinstance(given, (list, tuple)) else [{} if given is None else given] * modes
    if len(each) != modes:
        raise ValueError(
            f"{_OP}: argument 'ub_cfgs' has {len(each)} dictionaries, wanted one for each of the {modes} "
            "quantization modes."
        )
    for options in each:
        if not isinstance(options, Mapping) or not all(
            isinstance(layer, str) and isinstance(its, Mapping) for layer, its in options.items()
        ):
            raise TypeError(f"{_OP}: argument 'ub_cfgs' has {options!r}, wanted {{layer: {{option: value}}}}.")
    return each


def destroy_ub() -> None:
    """Drops the arguments of initialize_ub, and frees the memory in which layers receive, unless a call uses it. Later
    calls allocate it again."""
    global _reserved
    _reserved = None
    _C.release_comm_buffers()
