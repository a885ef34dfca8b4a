"""New values for many quantized tensors: tensors of one kind take them by one call of the engine, the others one by
one. Each format's quantizer does the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor import engine
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer


@torch.no_grad()
def quantize_all(
    tensors: Sequence[QuantizedTensor], values: Sequence[torch.Tensor], *, noop_flag: torch.Tensor | None = None
) -> None:
    """quantize_(value, noop_flag=noop_flag) of each, with its errors: for one kind before any of them is written."""
    alike: dict[tuple, list[tuple[QuantizedTensor, torch.Tensor]]] = {}
    for number, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
        key = _kind(tensor, value)
        alike.setdefault((number,) if key is None else key, []).append((tensor, value.detach()))
    for some in alike.values():
        if len(some) == 1 or _overlap([tensor for tensor, _ in some]):  # overlapping: the last values must stay
            for tensor, value in some:
                tensor.quantize_(value, noop_flag=noop_flag)
            continue
        for tensor, value in some:
            tensor._get_quantizer()._must_fit(value, tensor)
            tensor._must_be_writable()
        quantizers = [tensor._get_quantizer()._native() for tensor, _ in some]
        handles = [tensor._native() for tensor, _ in some]
        _C.quantize_list_into(quantizers, [value for _, value in some], handles, noop_flag)
        for tensor, _ in some:
            tensor._written()


def _overlap(tensors: Sequence[QuantizedTensor]) -> bool:
    """Whether any of them share memory; their parts are plain."""
    addresses = [part.data_ptr() for tensor in tensors for part in tensor._tensors().values()]
    return len(set(addresses)) < len(addresses)


def _kind(tensor: QuantizedTensor, value: torch.Tensor) -> tuple | None:
    """Equal for tensors that one call takes, whose quantize_() is Quantizer._write and no more; None: no call takes
    it."""
    quantizer = tensor._get_quantizer()
    own = type(quantizer)
    is_default_write = own.update_quantized is Quantizer.update_quantized and own._write is Quantizer._write
    if not is_default_write or quantizer._is_python() or tensor._rows_of is not None or value.dim() != 2:
        return None
    if not (tensor._is_pitched() and engine.is_plain(value, *tensor._tensors().values())):
        return None
    spec, usages = quantizer._native().spec, tensor.get_usages()
    return type(tensor), *spec, *usages.values(), value.shape, value.dtype, value.device
