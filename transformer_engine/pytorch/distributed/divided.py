"""The saved input of a checkpoint, divided over a group: each rank keeps its part of a tensor that all ranks have, and
the backward gathers it. The bytes are unchanged."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from transformer_engine.pytorch.distributed.groups import check_agreement, check_device, ranks_of
from transformer_engine.pytorch.saved import Hooks, PackedStorage, StorageHandler


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class _Part(PackedStorage):
    """This rank's part of a storage, rounded up to whole bytes for each."""

    __slots__ = ("_group", "_part")

    status, back = "divided", "one gather over the group"

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> None:
        super().__init__(tensor)
        data = _bytes_of(tensor)
        each = -(-data.numel() // ranks)
        first = each * dist.get_rank(group)
        self._group = group
        self._part = data.new_zeros(each)
        own = data[first : first + each]
        self._part[: own.numel()].copy_(own)

    def restore(self) -> torch.Tensor:
        data = self._part.new_empty(self._part.numel() * dist.get_world_size(self._group))
        dist.all_gather_into_tensor(data, self._part, group=self._group)
        return data[: self.bytes]


class _Divide(StorageHandler):
    """Takes one storage."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> None:
        super().__init__()
        self._key, self._over = tensor.untyped_storage()._cdata, (group, ranks)

    def take(self, tensor: torch.Tensor) -> PackedStorage | None:
        if tensor.untyped_storage()._cdata != self._key:
            return None
        part = _Part(tensor, *self._over)
        part.let_go()
        return part


def divided_inputs(
    function: Callable, leaves: list[object], group: dist.ProcessGroup | None
) -> AbstractContextManager[object]:
    """Wraps a checkpoint of `function`: its first tensor is saved in parts.

    Errors: ValueError without a group, if the ranks have different tensors, and for layers whose ranks have tokens of
    their own (sequence_parallel), which cannot be divided again."""
    op = "checkpoint"
    if group is None:
        raise ValueError(
            f"{op}: argument 'distribute_saved_activations' is True and 'tp_group' None; wanted the group over which "
            "saved activations are divided."
        )
    ranks = ranks_of(op, "tp_group", group)
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module) and any(
        getattr(part, "sequence_parallel", False) for part in owner.modules()
    ):
        raise ValueError(
            f"{op}: argument 'distribute_saved_activations' is True, but the function has sequence_parallel layers, "
            "whose ranks already have tokens of their own; leave it at False."
        )
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if ranks == 1 or first is None:
        return nullcontext()
    check_device(op, "args", first, group)
    check_agreement(op, first, group)
    return Hooks(_Divide(first, group, ranks))
