"""Checks of a group before a collective starts: that it exists, that it supports the tensor's device, and over gloo
that every rank brings the same; over NCCL the posted fingerprints. Nothing else is sent here."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


def ranks_of(op: str, argument: str, group: object | None) -> int:
    """The group's size; 1 for None if torch.distributed has not been initialised. Errors: TypeError unless it is a
    group, RuntimeError for one of several ranks that has been destroyed, ValueError if this process is not in it."""
    if not dist.is_available() or (group is None and not dist.is_initialized()):
        return 1
    if group is None:
        return dist.get_world_size()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: argument '{argument}' is a group that this process is not in; call it on its ranks.")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: argument '{argument}' is a {type(group).__name__}, wanted a torch.distributed.ProcessGroup or "
            "None; a DeviceMesh has get_group()."
        )
    try:
        return len(dist.get_process_group_ranks(group))
    except KeyError:
        if group.size() == 1:  # nothing is sent, so torch need not know it
            return 1
        raise RuntimeError(
            f"{op}: argument '{argument}' is a process group that has been destroyed; make a new one with "
            "torch.distributed.new_group."
        ) from None


def get_distributed_world_size(group: object | None = None) -> int:
    """The group's size, None being all processes; 1 if torch.distributed has not been initialised."""
    return ranks_of("get_distributed_world_size", "group", group)


def get_distributed_rank(group: object | None = None) -> int:
    """This process's rank in the group, None being all; 0 if torch.distributed has not been initialised."""
    return dist.get_rank(group) if get_distributed_world_size(group) > 1 else 0


def check_plain(op: str, inp: object, dims: int = 1) -> None:
    """Raises unless `inp` is a plain tensor of at least `dims` dimensions."""
    check_tensor(op, "inp", inp)
    if isinstance(inp, QuantizedTensorStorage):
        raise ValueError(
            f"{op}: argument 'inp' is a {type(inp).__name__}, wanted a plain tensor; dequantize() it, or gather it by "
            "gather_along_first_dim."
        )
    if inp.dim() < dims:
        raise ValueError(f"{op}: argument 'inp' has no dimensions, wanted at least one.")


def check_device(op: str, argument: str, tensor: torch.Tensor, group: object | None) -> None:
    """Raises ValueError if the group has no backend for the tensor's device."""
    backends = _backends(group)
    if tensor.device.type not in backends:
        raise ValueError(
            f"{op}: argument '{argument}' is on {tensor.device}, but the group communicates tensors on "
            f"{' or '.join(sorted(backends))} ({', '.join(sorted(set(backends.values())))}); move it with .to(device), "
            "or give a group of another backend."
        )


def _backends(group: object | None) -> dict[str, str]:
    """Device type -> backend."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


class RankCall(NamedTuple):
    """One rank's arguments: csrc/distributed/agreement.h."""

    op: str
    details: int
    dtype: torch.dtype
    sizes: list[int]


def calls_of_ranks(op: str, details: str, dtype: torch.dtype, sizes: list[int], group: object | None) -> list[RankCall]:
    """The arguments of each rank of the group; empty if the group has no gloo for the CPU."""
    if _backends(group).get("cpu") != "gloo":
        return []
    return [
        RankCall(*call) for call in _C.gather_calls(_name_of(group), op, zlib.crc32(details.encode()), dtype, sizes)
    ]


def post_fingerprint(
    op: str, details: str, dtype: torch.dtype, sizes: list[int], device: torch.device, group: object | None
) -> None:
    """Over NCCL posts a fingerprint of the collective that follows, without a wait: csrc/distributed/fingerprints.h.
    Functions with a traced form post the fingerprint of that form, because another rank may run it. ValueError if the
    group's ranks were found to differ before."""
    if _backends(group).get(device.type) != "nccl":
        return
    if torch.cuda.is_current_stream_capturing():
        _C.stop_comparing(_name_of(group), device)
    else:
        _C.post_fingerprint(_name_of(group), device, op, zlib.crc32(details.encode()), dtype, sizes)


@contextmanager
def enqueue_guard(group: object | None, device: torch.device) -> Iterator[None]:
    """Wraps the enqueueing of a collective: csrc/distributed/fingerprints.h."""
    held = _C.EnqueueGuard(_name_of(group)) if _backends(group).get(device.type) == "nccl" else None
    try:
        yield
    finally:
        del held


def _name_of(group: object | None) -> str:
    return (dist.group.WORLD if group is None else group).group_name


def check_agreement(op: str, inp: torch.Tensor, group: object | None, details: str = "") -> None:
    """On the CPU and over gloo, raises the same ValueError on every rank if the ranks bring tensors of different shapes
    or dtypes, are in different functions or treat them differently (`details`): a collective would give wrong results
    then, or never end. For tensors on other devices the caller must keep sizes equal, because a comparison would take
    longer than many a collective (but see post_fingerprint)."""
    if torch.compiler.is_compiling():  # tracing cannot compare
        return
    if inp.device.type != "cpu" and _backends(group).get(inp.device.type) != "gloo":
        return
    every = calls_of_ranks(op, details, inp.dtype, list(inp.shape), group)
    if all(call == every[0] for call in every):
        return
    described = "; ".join(f"rank {rank} {call.dtype} {call.sizes}" for rank, call in enumerate(every))
    if len({call.op for call in every}) > 1:
        described = "; ".join(f"rank {rank} {call.op} {call.dtype} {call.sizes}" for rank, call in enumerate(every))
        raise ValueError(
            f"{op}: the ranks of the group are in different functions, wanted one; their tensors: {described}."
        )
    if len({call.details for call in every}) > 1:
        raise ValueError(
            f"{op}: the ranks of the group quantize differently, wanted one recipe; their tensors: {described}."
        )
    raise ValueError(
        f"{op}: argument 'inp' differs between the ranks of the group: {described}; wanted the same shape and dtype on "
        "each of them. Pad it to equal sizes."
    )


def check_divides(op: str, inp: torch.Tensor, ranks: int) -> None:
    """Raises unless the ranks divide the rows."""
    if inp.shape[0] % ranks:
        raise ValueError(
            f"{op}: argument 'inp' has {inp.shape[0]} rows, wanted a multiple of the group's {ranks} ranks; pad it."
        )


def post_gather(rows: torch.Tensor, group: object | None) -> None:
    """Posts the fingerprint of gathered_traced()."""
    post_fingerprint("group_gather", "", rows.dtype, list(rows.shape), rows.device, group)


def gathered_traced(rows: torch.Tensor, group: object | None) -> torch.Tensor:
    """Every rank's rows, under torch.compile."""
    group = dist.group.WORLD if group is None else group
    return torch.ops.te.group_gather(rows.contiguous(), group.group_name, group.size())
