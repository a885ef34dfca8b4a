"""Weights that are held in FP8 alone: a buffer has their bytes, shards have their masters. Each master is cast into the
bytes of its shard as a part of the whole weight, by one exchange of amaxes for the weights of a bucket group.
Columnwise data are made of the bytes after a gather (tensor/master_casts.py)."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.optimizers.adam_states import first_master
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor
from transformer_engine.pytorch.tensor.utils import replace_raw_data

_PITCH = 16  # bytes between rows that products ask for


def is_fp8(param: torch.Tensor) -> bool:
    return isinstance(param, QuantizedTensor)


def check_sharded(op: str, name: str, param: Any) -> None:
    """Raises NotImplementedError for a weight whose bytes cannot be part of a buffer."""
    if not isinstance(param, (Float8Tensor, Float8BlockwiseQTensor)):
        raise NotImplementedError(
            f"{op}: parameter '{name}' is a {type(param).__name__}, which is not sharded, wanted one of delayed or "
            "current scaling or of 128x128 blocks, or use_distributed_optimizer=False."
        )
    if param.shape[-1] % _PITCH:
        raise NotImplementedError(
            f"{op}: parameter '{name}' has FP8 rows of {param.shape[-1]} bytes, which are not sharded, wanted a "
            f"multiple of {_PITCH}, or use_distributed_optimizer=False."
        )


def raw_data(param: Any) -> torch.Tensor:
    return getattr(param, param._gathered[0])


def place(param: Any, memory: torch.Tensor) -> None:
    """Moves the bytes into `memory` (flat uint8), with the values that they have."""
    replace_raw_data(param, memory.view(raw_data(param).shape))


def first_values(param: Any, start: int, end: int) -> torch.Tensor:
    """float32 elements [start, end) of the master; of the parameter's shape where that is all of it."""
    values = first_master(param).to(torch.float32)
    if end - start == param.numel():
        return values.clone().view(param.shape)
    return values.reshape(-1)[start:end].clone()


def clear_first_values(param: Any) -> None:
    """Frees the values that the weight was made of: masters have them now."""
    clear = getattr(param, "clear_high_precision_init_val", None)
    if clear is not None:
        clear()
