"""All-reduces by kernels that read the other ranks' memory: torch's symmetric memory, on CUDA devices that reach each
other. On the CPU the sum is torch.distributed's all-reduce. No multicast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import symmetric_memory
from transformer_engine.pytorch.distributed.groups import check_agreement, check_device, check_plain, ranks_of
from transformer_engine.pytorch.distributed.work import Work

_OP = "symmetric_all_reduce"
_TYPES = ("one_shot", "two_shot")
_LATER = "multimem_all_reduce"
_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_ALIGN = 16  # bytes that the kernels move together

# (group, device, dtype) -> memory that every rank of the group sees. Calls of one group follow each other on one
# stream, and each kernel ends when every rank has read.
_staging: dict[tuple, torch.Tensor] = {}


def symmetric_all_reduce(
    inp: torch.Tensor,
    tp_group: object | None = None,
    async_op: bool = False,
    all_reduce_type: str = "multimem_all_reduce",
) -> tuple[torch.Tensor, object | None]:
    """The sum of every rank's inp, in a tensor of its own; inp is not written. With one rank inp itself.

    all_reduce_type: "one_shot" (each rank reads all data of every rank: for small tensors) or "two_shot" (each reads
    its share, then the others' sums). On CUDA by torch's kernels over symmetric memory, in float32 or bfloat16, without
    autograd; on the CPU, which has no such memory, both are torch.distributed's all-reduce.
    Returns (sum, work); work is None unless async_op, and the sum is valid after work.wait().
    Errors: NotImplementedError for "multimem_all_reduce", the default (multicast is not used here); ValueError for
    another type, dtype or device; RuntimeError if the devices do not reach each other.
    """
    if all_reduce_type == _LATER:
        raise NotImplementedError(
            f"{_OP}: argument 'all_reduce_type' is {_LATER!r}, but multicast reductions are not available in this "
            "version; use 'one_shot' or 'two_shot'."
        )
    if all_reduce_type not in _TYPES:
        raise ValueError(f"{_OP}: argument 'all_reduce_type' is {all_reduce_type!r}, wanted 'one_shot' or 'two_shot'.")
    check_plain(_OP, inp, dims=0)
    ranks = ranks_of(_OP, "tp_group", tp_group)
    if ranks == 1:
        return inp, None
    group = dist.group.WORLD if tp_group is None else tp_group
    check_device(_OP, "inp", inp, group)
    if inp.device.type == "cpu":  # for other devices the group sends nothing
        check_agreement(_OP, inp, group)
    with torch.no_grad():
        if not inp.numel():
            return inp.clone(), Work() if async_op else None
        if inp.device.type == "cpu":
            out = inp.clone(memory_format=torch.contiguous_format)
            return out, dist.all_reduce(out, group=group, async_op=async_op)
        return _by_kernels(inp, group, ranks, all_reduce_type), Work() if async_op else None


def _of_modules(inp: torch.Tensor, group: str, ranks: int, kind: int) -> torch.Tensor:
    """The sum of a row layer with symmetric_ar_type (csrc/distributed/group.cpp calls it, for tensors that are not on
    the CPU)."""
    found = dist.distributed_c10d._resolve_process_group(group)
    with torch.no_grad():
        return _by_kernels(inp, found, ranks, _TYPES[kind - 1])


_C.set_symmetric_sum(_of_modules)


def _by_kernels(inp: torch.Tensor, group: dist.ProcessGroup, ranks: int, kind: str) -> torch.Tensor:
    if inp.device.type != "cuda" or inp.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{_OP}: argument 'inp' is {inp.dtype} on {inp.device}, wanted float32 or bfloat16 on the CPU or a CUDA "
            "device; use allreduce for others."
        )
    count, unit = inp.numel(), ranks * _ALIGN // inp.element_size()
    shared = _shared(-(-count // unit) * unit, inp, group)
    shared[:count].copy_(inp.reshape(-1))
    if kind == "one_shot":
        total = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)
        return total[:count].view(inp.shape)
    torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group.group_name)
    return shared[:count].clone().view(inp.shape)


def _shared(count: int, inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """So many elements that every rank sees; all ranks request the same number, so that their memory grows together."""
    key = group, inp.device, inp.dtype
    found = _staging.get(key)
    if found is None or found.numel() < count:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{_OP}: argument 'inp' needs {count} elements of memory that all ranks see, which cannot be made while"
                " a graph is captured; run the same call once before the capture."
            )
        _forget_destroyed()
        found = _staging[key] = _rendezvous(1 << (count - 1).bit_length(), inp, group)
    return found[:count]


def _rendezvous(count: int, inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    symm_mem = symmetric_memory()
    result = symm_mem.empty(count, dtype=inp.dtype, device=inp.device)
    try:
        with without_multicast():
            symm_mem.rendezvous(result, group.group_name)
    except RuntimeError as error:
        raise RuntimeError(
            f"{_OP}: argument 'tp_group' has ranks whose devices do not see each other's memory; use allreduce, or "
            "symmetric_ar_type=None in a module."
        ) from error
    return result


def _forget_destroyed() -> None:
    for key in list(_staging):
        try:
            ranks_of(_OP, "tp_group", key[0])
        except RuntimeError:
            del _staging[key]


@contextmanager
def without_multicast() -> Iterator[None]:
    before = os.environ.get(_MULTICAST)
    os.environ[_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST]
        else:
            os.environ[_MULTICAST] = before
