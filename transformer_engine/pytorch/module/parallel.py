"""Tensor parallelism of a module: its group, by name, how its sizes are divided, and the TPComm of each product.
Nothing is communicated here: csrc/layer/tp_comm_group.h does it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.arguments import check_size
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.distributed.peer import kind_of, peer_channel
from transformer_engine.pytorch.distributed.regions import gather_by_name
from transformer_engine.pytorch.functional.linear import Parallel, TPComm
from transformer_engine.pytorch.quantization.recipes.products import BACKWARD_SLOTS, FORWARD_SLOTS, SLOTS

_MODES = {"column": 1, "row": 2}
# How a row layer's output is summed without sequence parallelism: by the group, or by kernels over symmetric memory.
_SUMS = {None: 0, "one_shot": 1, "two_shot": 2}
_ARRIVED = 2  # a value of `recompute` besides 0 and 1: csrc/layer/tp_comm_group.h
_SERIAL, _CHUNKED, _AUTO = range(3)  # the overlap modes of csrc/layer/tp_comm_group.h


def group_size(op: str, tp_group: object | None, tp_size: object) -> int:
    """The ranks that a module is divided over: a group's size takes precedence over `tp_size`."""
    check_size(op, "tp_size", tp_size, 1)
    return int(tp_size) if tp_group is None else ranks_of(op, "tp_group", tp_group)


def check_ranks(op: str, tp_group: object | None, ranks: int) -> None:
    """Raises for an object that is not a group, or a group of another size than `ranks`."""
    found = group_size(op, tp_group, ranks)
    if found != ranks:
        raise ValueError(
            f"{op}: argument 'tp_group' has {found} ranks, but the module's sizes are divided by {ranks}; "
            "pass a group of that size, or make the module with this one."
        )


def divided(op: str, argument: str, size: int, ranks: int) -> int:
    """One rank's part of `size`."""
    if ranks > 1:
        check_size(op, argument, size)
        if size % ranks:
            raise ValueError(
                f"{op}: argument '{argument}' is {size}, which the {ranks} ranks of the tensor-parallel group do not "
                "divide; wanted a multiple."
            )
        return size // ranks
    return size


def check_options(
    op: str, *, tp_overlap: str, tp_recompute_allgather: bool, symmetric_ar_type: str | None = None, row: bool = False
) -> None:
    """Raises for options that are unknown, or not available yet. row: the module is a row layer, which gathers no
    input."""
    if tp_overlap not in ("auto", "off", "chunked"):
        raise ValueError(f"{op}: argument 'tp_overlap' is {tp_overlap!r}, wanted 'auto', 'off' or 'chunked'.")
    if row and not tp_recompute_allgather:
        raise ValueError(
            f"{op}: argument 'tp_recompute_allgather' is False, but a row layer gathers no input that could be kept; "
            "leave it at its default."
        )
    if symmetric_ar_type not in (None, "one_shot", "two_shot", "multimem_all_reduce"):
        raise ValueError(
            f"{op}: argument 'symmetric_ar_type' is {symmetric_ar_type!r}, wanted None, 'one_shot' or 'two_shot'."
        )
    if symmetric_ar_type == "multimem_all_reduce":
        raise NotImplementedError(
            f"{op}: argument 'symmetric_ar_type' is {symmetric_ar_type!r}, but multicast reductions are not available "
            "in this version; use 'one_shot', 'two_shot' or None."
        )


def _group_of(module: torch.nn.Module) -> dist.ProcessGroup | None:
    """The group, or None. Errors: RuntimeError if it was destroyed."""
    name = module._tp_group_name
    if name is None:
        return None
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, LookupError, ValueError):
        raise RuntimeError(
            f"{type(module).__name__}: the process group '{name}' of tp_group does not exist, or was destroyed; make "
            "one and pass it to set_tensor_parallel_group()."
        ) from None


def keep_group(module: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    group_size(type(module).__name__, group, 1)
    module._tp_group_name = None if group is None else group.group_name


# A module's `tp_group`, stored by name, so that a module can be copied and pickled.
group_by_name = property(_group_of, keep_group)


def gathered_columns(module: torch.nn.Module, forward: bool) -> tuple[str, list[int]] | None:
    """The value of ScalingState.gathered."""
    if not module.sequence_parallel or module._tp_group_name is None:
        return None
    mode, slots, slot = ("column", FORWARD_SLOTS, "input") if forward else ("row", BACKWARD_SLOTS, "grad_output")
    columns = [slots * i + SLOTS[slot] for i, found in enumerate(module._modes()) if found == mode]
    return (module._tp_group_name, columns) if columns else None


def tp_comm_of(module: torch.nn.Module, mode: str | None, inp: torch.Tensor) -> TPComm:
    """The TPComm of this call's product; None if nothing is communicated."""
    if module.tp_size == 1 or mode is None:
        return None
    # The second run of a checkpoint exists for its backward alone: it keeps the gathered operand until then. The first
    # run saves nothing, and must use the same mode: neither run gathers more in order to save it.
    recompute = _ARRIVED if recompute_phase().enabled else int(module.tp_recompute_allgather)
    if torch.compiler.is_compiling():
        spec = [_MODES[mode], int(module.sequence_parallel), recompute, module.tp_size, _sum_of(module, mode)]
        return Parallel(spec, _named_group(module, inp.device.type))
    tp_comms = module.runtime.tp_comms
    key = mode, recompute, module.sequence_parallel, inp.device, module.tp_overlap, _sum_of(module, mode)
    found = tp_comms.get(key)
    # A new group may have the same name, which a channel does not detect.
    if found is None or not found.reaches(inp.device):
        name = _named_group(module, inp.device.type)
        options = _MODES[mode], module.sequence_parallel, recompute, module.tp_size, name, _sum_of(module, mode)
        found = _C.GroupTPComm(*options, *_overlap_of(module, name, inp.device))
        tp_comms[key] = found
    return found


def _overlap_of(module: torch.nn.Module, name: str, device: torch.device) -> tuple[int, str]:
    """The overlap mode, and the reason that te.explain shows for collectives over the group. All ranks call this and
    meet here if they use peers, because they have the same options and one kind of device."""
    op, overlap = type(module).__name__, module.tp_overlap
    if overlap == "off" or not module.sequence_parallel:
        return _SERIAL, ""
    if overlap == "chunked":
        try:
            peer_channel(op, name, device)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{op}: argument 'tp_overlap' is 'chunked', but {error}; use 'auto' or 'off'."
            ) from None
        return _CHUNKED, ""
    least = _C.comm_least_rows(kind_of(device))
    if least is None:
        return _SERIAL, "no measured costs for this device: tp_overlap='chunked' selects chunks"
    try:
        peer_channel(op, name, device)
    except NotImplementedError as error:
        return _SERIAL, str(error)
    words = "a gather of fewer than {} tokens, or a scatter of fewer than {}, takes less time over the group"
    return _AUTO, words.format(*least)


def _sum_of(module: torch.nn.Module, mode: str) -> int:
    return _SUMS[getattr(module, "symmetric_ar_type", None)] if mode == "row" and not module.sequence_parallel else 0


def gathered(module: torch.nn.Module, norm_output: torch.Tensor) -> torch.Tensor:
    """The norm's output of all ranks if tokens are divided: return_layernorm_output_gathered."""
    if not module.sequence_parallel:
        return norm_output
    return gather_by_name(norm_output, _named_group(module, norm_output.device.type), module.tp_size)


def _named_group(module: torch.nn.Module, device: str) -> str:
    """The group's name, for tensors on that device type."""
    op, name = type(module).__name__, module._tp_group_name
    if name is None:
        raise RuntimeError(
            f"{op}: the module is divided over {module.tp_size} ranks (tp_size), but has no group; call "
            "set_tensor_parallel_group() before the first forward."
        )
    if torch.compiler.is_compiling():  # tracing cannot ask a group; its collectives raise later
        return name
    devices = [kind.type for kind in module.tp_group._device_types]
    if device not in devices:
        raise ValueError(
            f"{op}: argument 'inp' is on {device}, but the tensor-parallel group '{name}' "
            f"communicates on {', '.join(devices)}; move the module and its input, or make a group for {device}."
        )
    return name
