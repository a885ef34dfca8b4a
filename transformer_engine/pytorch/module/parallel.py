"""Tensor parallelism as a module knows it: its group, by name, how its sizes are divided, and each product's exchange.
Nothing is communicated here: csrc/layer/exchange_group.h does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._arguments import check_size
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.distributed.regions import gather_from_sequence_parallel_region
from transformer_engine.pytorch.functional.linear import Exchange, Parallel
from transformer_engine.pytorch.quantization.products import BACKWARD_SLOTS, FORWARD_SLOTS, SLOTS
from transformer_engine.pytorch.recompute_phase import recompute_phase

_MODES = {"column": 1, "row": 2}
_ARRIVED = 2  # beside a recompute of 0 and 1: csrc/layer/exchange_group.h


def group_size(op: str, tp_group: object | None, tp_size: object) -> int:
    """The ranks that a module is divided over: a group's size wins over `tp_size`."""
    check_size(op, "tp_size", tp_size, 1)
    return int(tp_size) if tp_group is None else ranks_of(op, "tp_group", tp_group)


def check_ranks(op: str, tp_group: object | None, ranks: int) -> None:
    """Raises for what is no group, or one of another size than `ranks`."""
    found = group_size(op, tp_group, ranks)
    if found != ranks:
        raise ValueError(
            f"{op}: argument 'tp_group' has {found} ranks, but the module's sizes are divided by {ranks}; "
            "pass a group of that size, or make the module with this one."
        )


def divided(op: str, argument: str, size: int, ranks: int) -> int:
    """A rank's part of `size`."""
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
    op: str, *, tp_overlap: str, tp_recompute_allgather: bool, symmetric_ar_type: str | None, row: bool = False
) -> None:
    """Raises for options that are unknown, or not here yet. row: the module is a row layer, which gathers no input."""
    if tp_overlap == "chunked":
        raise NotImplementedError(
            f"{op}: argument 'tp_overlap' is 'chunked', but products that overlap with communication are not available "
            "in this version; use 'auto' or 'off'."
        )
    if tp_overlap not in ("auto", "off"):
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
    if symmetric_ar_type is not None:
        raise NotImplementedError(
            f"{op}: argument 'symmetric_ar_type' is {symmetric_ar_type!r}, but all-reduces through symmetric memory "
            "are not available in this version; leave it at None."
        )


class GroupByName:
    """`tp_group`, kept by its name alone, so that a module can be copied and pickled."""

    tp_size: int = 1
    _tp_group_name: str | None = None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The group, or None. Errors: RuntimeError where it was destroyed."""
        name = self._tp_group_name
        if name is None:
            return None
        try:
            return dist.distributed_c10d._resolve_process_group(name)
        except (RuntimeError, LookupError, ValueError):
            raise RuntimeError(
                f"{type(self).__name__}: the tensor-parallel group '{name}' is not there, or was destroyed; make one "
                "and pass it to set_tensor_parallel_group()."
            ) from None

    @tp_group.setter
    def tp_group(self, group: dist.ProcessGroup | None) -> None:
        group_size(type(self).__name__, group, 1)
        self._tp_group_name = None if group is None else group.group_name

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Remembers the group: a module without products communicates nothing over it."""
        self.tp_group = tp_group


class TensorParallel(GroupByName):
    """What a module with products adds to that."""

    def _setup_parallel(
        self,
        *,
        tp_group: object | None,
        tp_size: int,
        sequence_parallel: bool,
        tp_recompute_allgather: bool,
        tp_overlap: str,
        symmetric_ar_type: str | None,
        parallel_mode: str | None = None,
    ) -> None:
        op = type(self).__name__
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"{op}: argument 'parallel_mode' is {parallel_mode!r}, wanted None, 'column' or 'row'.")
        check_options(
            op,
            tp_overlap=tp_overlap,
            tp_recompute_allgather=tp_recompute_allgather,
            symmetric_ar_type=symmetric_ar_type,
            row=parallel_mode == "row",
        )
        self.tp_size = group_size(op, tp_group, tp_size)
        self.tp_group = tp_group
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.parallel_mode = parallel_mode
        self.tp_recompute_allgather = tp_recompute_allgather
        self.tp_overlap = tp_overlap
        self._exchanges: dict[tuple, _C.GroupExchange] = {}

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """The group that the module communicates over, where it is divided over ranks.

        Errors: ValueError for a group of another size than the module was made for; it keeps the one it has then. Of
        one that is not divided every group is taken: nothing is communicated over it."""
        if self.tp_size > 1 or any(self._modes()):
            check_ranks(type(self).__name__, tp_group, self.tp_size)
        self.tp_group = tp_group

    @GroupByName.tp_group.setter
    def tp_group(self, group: dist.ProcessGroup | None) -> None:
        """Whichever way another group comes, nothing goes on over the one before."""
        GroupByName.tp_group.fset(self, group)
        self._exchanges = {}
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in self.fp8_meta:
                self.fp8_meta[key].gathered = self._gathered_columns(key == "scaling_fwd")

    def _modes(self) -> tuple[str | None, ...]:
        """Of each product."""
        return (self.parallel_mode,)

    def _gathered_columns(self, forward: bool) -> tuple[str, list[int]] | None:
        if not self.sequence_parallel or self._tp_group_name is None:
            return None
        mode, slots, slot = ("column", FORWARD_SLOTS, "input") if forward else ("row", BACKWARD_SLOTS, "grad_output")
        columns = [slots * i + SLOTS[slot] for i, found in enumerate(self._modes()) if found == mode]
        return (self._tp_group_name, columns) if columns else None

    def _exchange(self, mode: str | None, inp: torch.Tensor) -> Exchange:
        """Of this call's product; None where nothing is communicated."""
        if self.tp_size == 1 or mode is None:
            return None
        # The second run of a checkpoint is there for its backward alone: what comes for its product is kept until then.
        # The first one keeps nothing, whatever it says, and has to say the same: neither gathers more in order to keep.
        recompute = _ARRIVED if recompute_phase().enabled else int(self.tp_recompute_allgather)
        if torch.compiler.is_compiling():
            spec = [_MODES[mode], int(self.sequence_parallel), recompute, self.tp_size]
            return Parallel(spec, self._named_group(inp.device.type))
        key = mode, recompute, self.sequence_parallel, inp.device.type
        found = self._exchanges.get(key)
        if found is None:
            name = self._named_group(inp.device.type)
            found = _C.GroupExchange(_MODES[mode], self.sequence_parallel, recompute, self.tp_size, name)
            self._exchanges[key] = found
        return found

    def _gathered(self, norm_output: torch.Tensor) -> torch.Tensor:
        """Of all ranks, where tokens are divided: what return_layernorm_output_gathered is."""
        return (
            gather_from_sequence_parallel_region(norm_output, self.tp_group) if self.sequence_parallel else norm_output
        )

    def _named_group(self, device: str) -> str:
        """The group's name, for tensors on such a device."""
        op = type(self).__name__
        if self._tp_group_name is None:
            raise RuntimeError(
                f"{op}: the module is divided over {self.tp_size} ranks (tp_size), but has no group; call "
                "set_tensor_parallel_group() before the first forward."
            )
        if torch.compiler.is_compiling():  # where groups cannot be asked; their collectives say what they cannot do
            return self._tp_group_name
        devices = [kind.type for kind in self.tp_group._device_types]
        if device not in devices:
            raise ValueError(
                f"{op}: argument 'inp' is on {device}, but the tensor-parallel group '{self._tp_group_name}' "
                f"communicates on {', '.join(devices)}; move the module and its input, or make a group for {device}."
            )
        return self._tp_group_name
