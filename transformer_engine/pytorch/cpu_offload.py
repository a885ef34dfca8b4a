"""Offload of saved activations to the CPU: the names that clients import. Switched off it does nothing; moving is not
here yet."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from transformer_engine.pytorch._absent import absent, refusal

_OFFLOAD = "CPU offload is"


def is_cpu_offload_enabled() -> bool:
    """Whether the code that asks runs under an offload context: never, in this version."""
    return False


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: object | None = None,
) -> tuple[object, Callable]:
    """(context, sync): `with context: x = layer(x)`, then `x = sync(x)`. enabled=False: both change nothing."""
    if enabled:
        raise refusal("get_cpu_offload_context", _OFFLOAD, "pass enabled=False, or recompute with checkpoint")
    if manual_synchronization:
        raise refusal("get_cpu_offload_context", "manual_synchronization is", "leave it at False")
    return nullcontext(), _unchanged


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """These tensors are never moved; nothing is, in this version."""


@absent(_OFFLOAD)
def start_offload(*tensors: torch.Tensor, offload_base_tensor: bool = False) -> None:
    """These tensors are ready to be moved."""


@absent(_OFFLOAD)
def mark_activation_offload(*tensors: torch.Tensor) -> None:
    """These tensors are to be moved."""


@absent(_OFFLOAD)
class ManualOffloadSynchronizer:
    """Starts and ends moves where the caller says."""
