"""Small tensors packed into one range of bytes for one transfer, and unpacked. cpu_offload decides which tensors move,
and when."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def offload_packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that `tensors` take in packed form: each starts on a multiple of 256."""
    return _C.offload_packed_bytes([t.nbytes for t in tensors])


def offload_pack(tensors: Sequence[torch.Tensor], packed: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of `tensors` in a row, in `packed` (uint8, allocated if it is not given).

    Shapes: any; contiguous, all on one device. Dtypes: any. Not differentiable.
    Errors: ValueError for a tensor that is not contiguous or on another device, or a `packed` that is too small.
    """
    if packed is None:
        packed = torch.empty(offload_packed_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    _C.offload_pack(list(tensors), packed)
    return packed


def offload_unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes every element of `tensors` with the bytes that offload_pack took from tensors of the same sizes."""
    _C.offload_unpack(packed, list(tensors))
