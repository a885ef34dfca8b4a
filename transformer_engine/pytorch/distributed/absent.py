"""The names of `.distributed` whose capability this version lacks: symmetric memory for callers, and the FSDP of older
torch."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._internal.absent import absent

_SYMMETRIC = "symmetric memory is"
_FSDP2 = "wrap with torch.distributed.fsdp.fully_shard"


@absent(_SYMMETRIC)
def get_symmetric_memory_tensor(
    tensor_numel: int, tensor_dtype: torch.dtype, tensor_device: torch.device, tp_group: object, tag: object = None
) -> tuple[torch.Tensor, object]:
    """A tensor that each rank sees."""


@absent(_SYMMETRIC)
def symm_mem_alloc(
    shape: Sequence[int],
    dtype: torch.dtype,
    ep_group: object,
    device: torch.device | None = None,
    use_pool: bool = False,
    backend: str = "NCCL",
) -> torch.Tensor:
    """A tensor that each rank sees."""


@absent(_SYMMETRIC)
def release_symm_mem_pool() -> None:
    """Frees the contents of symm_mem_alloc's pool."""


@absent("the wrapper of FSDP1 is", _FSDP2)
def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Prepares the modules of a model for the FSDP1 wrapper around it."""


@absent("the wrapper of FSDP1 is", _FSDP2)
class FullyShardedDataParallel(torch.nn.Module):
    """FSDP1 with FP8 weights."""
