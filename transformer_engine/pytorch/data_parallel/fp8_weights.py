"""Weights that are held in FP8 alone: a buffer has their bytes, shards have their masters. Each master is cast into the
bytes of its shard as a part of the whole weight, by one exchange of amaxes for the weights of a bucket group.
Columnwise data are made of the bytes after a gather (tensor/master_casts.py).

Products read rows that begin on 16 bytes. Rows of another length are dense in the buffer, for the gather alone, and on
their pitch in the weight's own memory, which everything else reads and writes."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.data_parallel.flat_shard import boxes
from transformer_engine.pytorch.optimizers.adam_states import first_master
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, QuantizedTensor
from transformer_engine.pytorch.tensor.layout import PITCH, ROWWISE, data_bytes, empty_data, fold, pitched
from transformer_engine.pytorch.tensor.utils import replace_raw_data

NAN = 0x7F  # of E4M3 and of E5M2


def is_fp8(param: torch.Tensor) -> bool:
    return isinstance(param, QuantizedTensor)


def check_sharded(op: str, name: str, param: Any) -> None:
    """Raises NotImplementedError for a weight whose bytes cannot be part of a buffer."""
    if not isinstance(param, (Float8Tensor, Float8BlockwiseQTensor)):
        raise NotImplementedError(
            f"{op}: parameter '{name}' is a {type(param).__name__}, which is not sharded, wanted one of delayed or "
            "current scaling or of 128x128 blocks, or use_distributed_optimizer=False."
        )


def raw_data(param: Any) -> torch.Tensor:
    return getattr(param, param._gathered[0])


class PitchedRows:
    """A weight whose rows are off 16 bytes. memory: its part of a buffer, flat uint8."""

    def __init__(self, param: Any, memory: torch.Tensor) -> None:
        data = raw_data(param)
        if pitched(ROWWISE, data) is None:  # products would copy it in every forward
            replace_raw_data(param, empty_data(ROWWISE, data.shape, data.device))
            data = raw_data(param)
        self.rows = data.view(fold(data.shape))
        self.dense = memory.view(self.rows.shape)
        self.nbytes = data_bytes(*self.rows.shape)  # of its own memory, with the padding

    def part(self, start: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Elements [start, end) of the flattened weight, as matrices: in the buffer, and in its own memory."""
        found = []
        for (row, col), (rows, cols), _ in boxes(self.rows.shape, start, end):
            dense, own = (data[row : row + rows, col : col + cols] for data in (self.dense, self.rows))
            found.append((dense, own))
        return found


class PitchedShard:
    """The same on a rank that steps elements [start, end) of it, maybe none."""

    def __init__(self, weight: PitchedRows, start: int, end: int) -> None:
        self._weight, self._own = weight, weight.part(start, end)
        self._others = [*weight.part(0, start), *weight.part(end, weight.rows.numel())]

    def pack(self) -> None:
        """The bytes of this rank's part into the buffer, where they are gathered from."""
        for dense, own in self._own:
            dense.copy_(own)

    def lay(self) -> None:
        """The gathered bytes on their pitch."""
        self._weight.rows.copy_(self._weight.dense)

    def spoil(self) -> None:
        """All but this rank's part becomes NaN."""
        for _, other in self._others:
            other.fill_(NAN)


def place(param: Any, memory: torch.Tensor) -> PitchedRows | None:
    """Moves the bytes into `memory` (flat uint8), with the values that they have; rows off 16 bytes stay."""
    if param.shape[-1] % PITCH:
        return PitchedRows(param, memory)
    replace_raw_data(param, memory.view(raw_data(param).shape))
    return None


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
