"""DistributedOptimizer: an optimizer of model parameters whose step reads the wrapper's reduced gradients and writes
this rank's shards. How elements are stepped is steps.py's, what is saved files.py's."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch._internal.torch_private import disable_dynamo
from transformer_engine.pytorch.data_parallel import files
from transformer_engine.pytorch.data_parallel.flat_shard import Cut
from transformer_engine.pytorch.data_parallel.nan_check import NanReport
from transformer_engine.pytorch.data_parallel.norm import GradNorm, clip_factor
from transformer_engine.pytorch.data_parallel.report import HeldMemory, memory_of_states
from transformer_engine.pytorch.data_parallel.shards import OP, groups_in_gather_order, shards_of
from transformer_engine.pytorch.data_parallel.steps import steps_of
from transformer_engine.pytorch.data_parallel.wrapper import DistributedDataParallel
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.distributed.sharded_state import divisions_of


class DistributedOptimizer(torch.optim.Optimizer):
    """optimizer: FusedAdam, FusedSGD, or torch's Adam, AdamW or SGD, of parameters that the wrappers hold; its
    param_groups stay the ones that are read, so that schedulers of either work. Its states are made here, for this
    rank's shards where the wrappers shard, for whole parameters elsewhere.

    ddps: a DistributedDataParallel, or a list of them with one configuration. clip_grad: the largest norm of all
    gradients together; 0 for no limit. tp_group: over which parameters marked tensor_model_parallel are divided, and
    gradients marked sequence_parallel are summed. grad_stats_group: all ranks of the norm, for one collective in place
    of two. overlap_param_gather_with_optimizer_step: each bucket group is gathered as soon as its shard is stepped.

    step() waits for the gradients, and for nothing on the host, and returns the norm on the device. It is skipped on
    the device where `found_inf` is set, a GradScaler finds an Inf, or where check_for_nan_in_grad finds a local
    gradient that is not finite; then, and then alone, also where the norm is not finite.

    Errors: ValueError for what does not fit, NotImplementedError for optimizers that read more than an element at a
    time, for clipping by them, and for a step() that is being captured."""

    _is_made = False
    _step_supports_amp_scaling = True  # torch's GradScaler passes itself to step()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ddps: DistributedDataParallel | Sequence[DistributedDataParallel],
        *,
        clip_grad: float = 0.0,
        tp_group: Any = None,
        grad_stats_group: Any = None,
        overlap_param_gather_with_optimizer_step: bool = False,
    ) -> None:
        self.ddps = _checked_wrappers(ddps)
        if isinstance(clip_grad, bool) or not isinstance(clip_grad, (int, float)) or not clip_grad >= 0:
            raise ValueError(f"{OP}: argument 'clip_grad' is {clip_grad!r}, wanted a number >= 0; 0 does not clip.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{OP}: argument 'optimizer' is a {type(optimizer).__name__}, wanted a torch Optimizer.")
        self.optimizer, self.clip_grad = optimizer, float(clip_grad)
        self._shards = shards_of(optimizer.param_groups, self.ddps)
        device = self.ddps[0].buffers_device
        self._steps = steps_of(optimizer, self._shards, device)
        every = [shard for own in self._shards for shard in own]
        self._whole = [s for s in every if not (s.group.is_sharded or s.is_fp8)]
        self._kept = _C.KeptObjects()  # their memory is the parameters' own
        for shard in self._whole:
            self._kept.add(shard.param, [], [shard.param])
        self._norm = GradNorm(every, self.ddps[0], tp_group, grad_stats_group)
        self._tp_group = tp_group
        self._cuts = _cuts_of(self.ddps, tp_group)
        if (unknown := files.unknown_cut(self)) is not None:
            warnings.warn(f"{OP}: state_dict() will raise: {unknown}", stacklevel=2)
        marked = [s for s in every if getattr(s.param, "sequence_parallel", False) is True]
        self._summed = marked if tp_group is not None and ranks_of(OP, "tp_group", tp_group) > 1 else []
        self._reductions_summed: list[int] | None = None  # how many there were then
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the list itself: groups are those that a scheduler writes
        self.state = defaultdict(dict, files.states_by_parameter(self, kept=True))
        self.by_group = bool(overlap_param_gather_with_optimizer_step)
        if self.by_group:
            self._overlap_gathers()
        self.found_inf: torch.Tensor | None = None
        self._is_made = True

    def _overlap_gathers(self) -> None:
        option = "overlap_param_gather_with_optimizer_step"
        if not all(ddp.use_forward_hook for ddp in self.ddps):
            raise ValueError(
                f"{OP}: argument '{option}' is True, wanted wrappers with use_distributed_optimizer=True and "
                "overlap_param_gather=True."
            )
        if not self._steps.by_groups:
            raise ValueError(
                f"{OP}: argument '{option}' is True with {type(self.optimizer).__name__}, wanted FusedAdam or "
                "FusedSGD, which step a part of the parameters."
            )
        for ddp in self.ddps:
            ddp.overlap_param_gather_with_optimizer_step = True
            if ddp.remove_forward_pre_hook_handles:  # those there start the next gather by themselves
                ddp.disable_forward_pre_hook(param_sync=False)
                ddp.enable_forward_pre_hook()

    # ---- a step ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The gradients in the wrappers' buffers become 0: a step begins. set_to_none changes nothing: main_grad stays
        where it is, and .grad is None."""
        self._check_wrappers("zero_grad()")
        for ddp in self.ddps:
            ddp._drop_complete_step()
            ddp.zero_grad_buffer()

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> torch.Tensor:
        """One step of all groups. Returns the norm of the unscaled gradients before clipping, float32 on the device.
        closure runs first. grad_scaler: torch's GradScaler passes itself; unscale_() is not to be called before, as
        this step unscales and clips."""
        self._check_wrappers("step()")
        for ddp in self.ddps:
            ddp._raise_for_nan()
        if stream_captures():
            raise NotImplementedError(f"{OP}: step() is being captured, wanted it outside of graphs.")
        if closure is not None:
            with torch.enable_grad():
                closure()
        for ddp in self.ddps:
            ddp._finish_grad_sync()
        self._sum_sequence_parallel()
        inv_scale = _inv_scale(grad_scaler, self._norm.device, self)
        norm, flags = self._norm(self._flags(grad_scaler))
        if inv_scale is not None:
            norm = norm * inv_scale.squeeze(0)
        noop = self._skip_flag(norm, flags)
        if grad_scaler is not None:  # whose update() reads it
            grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {norm.device: noop}
        self._run(noop, clip_factor(norm, self.clip_grad, inv_scale))
        return norm

    def _check_wrappers(self, call: str) -> None:
        for ddp in self.ddps:
            ddp._check_is_current(f"{call} of a DistributedOptimizer")
        moved = self._kept.changed()
        if moved >= 0:
            shard = self._whole[moved]
            raise RuntimeError(
                f"{OP}: parameter '{shard.group.names[shard.param]}' has moved to other memory since the optimizer was "
                "made, so that a step would not reach it, wanted it as it was; wrap the module and make the optimizer "
                "after .to() and casts."
            )

    def _sum_sequence_parallel(self) -> None:
        """Gradients of which each tensor-parallel rank has the sum over its own tokens; once for a reduction. The ranks
        have the same layout."""
        if not self._summed:
            return
        reductions = [group.reductions for ddp in self.ddps for group in ddp._groups]
        if reductions == self._reductions_summed:
            return
        self._reductions_summed = reductions
        flat = torch.cat([shard.gradient.reshape(-1) for shard in self._summed])
        torch.distributed.all_reduce(flat, group=self._tp_group)
        sizes = [shard.gradient.numel() for shard in self._summed]
        for shard, total in zip(self._summed, flat.split(sizes)):
            shard.gradient.copy_(total.view_as(shard.gradient))

    def _flags(self, grad_scaler: Any) -> torch.Tensor:
        """float64 [3] on the device, of this rank: whether it lets steps be skipped, whether something requests it,
        whether a local gradient is not finite."""
        found, device = self.found_inf, self._norm.device
        if found is not None and not isinstance(found, torch.Tensor):
            raise TypeError(
                f"DistributedOptimizer: attribute 'found_inf' is {found!r}, wanted None or a tensor of one element: "
                "set torch.tensor(1.0) on the device of the parameters."
            )
        if found is not None and found.numel() != 1:
            raise ValueError(
                f"DistributedOptimizer: attribute 'found_inf' has shape {list(found.shape)}, wanted one element: set "
                "found_inf.amax()."
            )
        nan = [flag for ddp in self.ddps if (flag := ddp._nan_flag()) is not None]
        flags = torch.zeros(3, dtype=torch.float64, device=device)
        if found is not None or grad_scaler is not None or nan:
            flags[0] = 1.0
        if found is not None:
            flags[1] = (found != 0).to(device).view(())
        if nan:
            flags[2] = torch.cat(nan).amax()
        return flags

    def _skip_flag(self, norm: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """float32 [1] on the device, 1 where the step is skipped on all ranks. flags: of all of them."""
        checks = [check for ddp in self.ddps for check in ddp._nan_checks]
        if checks:
            was_raised = any(ddp._nan_was_raised for ddp in self.ddps)
            report = NanReport(checks, flags[2], self._norm.where(), self._norm.all_gather_object, was_raised)
            for ddp in self.ddps:
                ddp._nan_report = report
        requests = torch.where(norm < torch.inf, flags[1:].sum(), flags.sum())
        return (requests > 0).float().view(1)

    def _run(self, noop: torch.Tensor, clip: torch.Tensor | None) -> None:
        for group in groups_in_gather_order(self.ddps):  # a gather reads the shards that a step writes
            if group.is_gathering:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        self._steps.begin(noop, clip)
        if not self.by_group:
            self._steps.run(None)
            for group in groups_in_gather_order(self.ddps):
                self._steps.cast_fp8(group)
            for ddp in self.ddps:
                ddp.reset_param_sync_dispatch_state()
                ddp._begin_gathers()
            return
        for group in groups_in_gather_order(self.ddps):
            self._steps.run({id(group)})
            self._steps.cast_fp8(group)
            group.note_step()
            group.start_param_sync()

    def _held_memory(self) -> Iterator[HeldMemory]:
        """For te.memory_plan."""
        return memory_of_states(self)

    # ---- files ----

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's own, by parameter. The states of shards are tensors of their parameters' shapes,
        which torch.distributed.checkpoint saves and loads in parts; others keep their values in this process alone.
        With tp_group so are the states of parameters marked tensor_model_parallel, in the shape of all its ranks."""
        return files.state_dict(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() gave, filled by torch.distributed.checkpoint or not, or an unsharded optimizer's,
        whose states are whole. Errors: ValueError for other shapes, names or groups; nothing is changed then."""
        files.load(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: its shards and states are those of the groups that there were."""
        if self._is_made:
            raise NotImplementedError(
                f"{OP}: add_param_group() was called, wanted all groups in the optimizer that it is made of."
            )
        super().add_param_group(param_group)


def _cuts_of(ddps: Sequence[DistributedDataParallel], tp_group: Any) -> dict[torch.Tensor, Cut | None]:
    """How tensor parallelism divides parameters, for files; None where marks do not define it."""
    ranks = 1 if tp_group is None else ranks_of(OP, "tp_group", tp_group)
    if ranks == 1:
        return {}
    rank = torch.distributed.get_rank(tp_group)
    divided = [divisions_of(ddp.module) for ddp in ddps]
    return {
        p: None if part is None else Cut(part[0], rank, ranks, part[1])
        for of_one in divided
        for p, part in of_one.items()
    }


def _checked_wrappers(ddps: Any) -> list[DistributedDataParallel]:
    wrappers = [ddps] if isinstance(ddps, DistributedDataParallel) else list(ddps)
    for wrapper in wrappers:
        if not isinstance(wrapper, DistributedDataParallel):
            raise TypeError(
                f"{OP}: argument 'ddps' has a {type(wrapper).__name__}, wanted a DistributedDataParallel or a list of "
                "them."
            )
    for wrapper in wrappers:
        wrapper._check_is_current(OP)
    if not wrappers:
        raise ValueError(f"{OP}: argument 'ddps' is empty, wanted one DistributedDataParallel at least.")
    if any(wrapper.config != wrappers[0].config for wrapper in wrappers):
        raise ValueError(f"{OP}: argument 'ddps' has wrappers of several configurations, wanted one.")
    if len({(id(w._comm.group), id(w._expert_comm and w._expert_comm.group)) for w in wrappers}) > 1:
        raise ValueError(f"{OP}: argument 'ddps' has wrappers of several process groups, wanted the same for all.")
    return wrappers


def _inv_scale(grad_scaler: Any, device: torch.device, optimizer: Any) -> torch.Tensor | None:
    """float32 [1]: what scaled gradients are multiplied with."""
    if grad_scaler is None or not grad_scaler.is_enabled():
        return None
    if grad_scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
        raise ValueError(
            f"{OP}: GradScaler.unscale_() was called before step(), wanted neither it nor clip_grad_norm_: the step "
            "unscales, and clips by 'clip_grad'."
        )
    return grad_scaler._get_scale_async().to(device).double().reciprocal().float().view(1)
