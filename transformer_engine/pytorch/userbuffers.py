"""Overlap of tensor-parallel communication through user buffers: the names that clients import. It is not here yet."""

from enum import Enum

import torch

from transformer_engine.pytorch._absent import absent

_OVERLAP = "overlap of tensor-parallel communication is"


class UserBufferQuantizationMode(Enum):
    """What a buffer holds."""

    NONE = "none"
    FP8 = "fp8"


@absent(_OVERLAP)
def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict | list[dict] | None = None,
    bootstrap_backend: str | None = None,
) -> None:
    """Makes the buffers."""


@absent(_OVERLAP)
def destroy_ub() -> None:
    """Frees the buffers."""
