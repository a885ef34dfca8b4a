"""How the shards of a rank are stepped by each optimizer that acts on elements alone: FusedAdam and FusedSGD in one
pass over memory, torch's Adam, AdamW and SGD on float32 shards. Norms and collectives are elsewhere.

Each of these keeps states for shards, made when it is, and `steps`: the number of steps of each parameter group, int32
on the device, which a skipped step leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.data_parallel import fp8_weights
from transformer_engine.pytorch.data_parallel.groups import BucketGroup
from transformer_engine.pytorch.data_parallel.shards import OP, Shard
from transformer_engine.pytorch.functional import optimizer_count_step, optimizer_scale, optimizer_sgd
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD
from transformer_engine.pytorch.tensor.master_casts import ColumnsOfWeights, MasterCasts

MASTER = "master_param"
MOMENTUM = "momentum_buffer"
_FLOAT = torch.float32
_ADAM_OPTIONS = (
    "adam_w_mode",
    "master_weights",
    "master_weight_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
)

Tensors = Sequence[torch.Tensor]


class Steps:
    """shards: of each group of `param_groups`, which is the wrapped optimizer's own list: options are read in each
    step."""

    by_groups = True  # whether a part of the shards can be stepped by itself
    counts_by_group = False  # whether the optimizer's own state dict has a step for each group

    def __init__(self, optimizer: Any, shards: list[list[Shard]], device: torch.device) -> None:
        self.optimizer, self.param_groups, self.shards = optimizer, optimizer.param_groups, shards
        self.steps = [torch.zeros(1, dtype=torch.int32, device=device) for _ in self.param_groups]
        self._casts: dict[BucketGroup, list[Callable[[], None]]] = {}  # of FP8 weights

    def begin(self, noop: torch.Tensor, clip: torch.Tensor | None) -> None:
        """A step of all shards begins: counts it, unless noop (float32 [1]) is set."""
        self.noop, self.clip = noop, clip
        for step in self.steps:
            optimizer_count_step(step, noop)

    def run(self, chosen: set[int] | None) -> None:
        """Steps the shards whose bucket groups are chosen, by id; None for all."""
        raise NotImplementedError

    # For files.py. A state's dtype is None where it is a count, not a tensor of the parameter's shape.

    def state_of(self, number: int, index: int) -> dict[str, Any]:
        """Of a shard of a group, as the optimizer's own state dict has it."""
        raise NotImplementedError

    def kept_of(self, number: int, index: int) -> dict[str, Any]:
        """The state in the dtypes that it has in memory: no copy."""
        return self.state_of(number, index)

    def scales_of(self, number: int, index: int) -> dict[str, torch.Tensor]:
        """Of states that are kept scaled."""
        return {}

    def names_of(self, number: int, param: torch.Tensor) -> dict[str, torch.dtype | None]:
        """The keys of state_of for a parameter of that group: name -> dtype."""
        raise NotImplementedError

    def load_state(self, number: int, index: int, name: str, value: Any) -> None:
        self.state_of(number, index)[name].copy_(value)

    def count_of(self, param: torch.Tensor) -> torch.Tensor:
        """The steps of a parameter that has no shard on this rank, where states have a count of their own."""
        raise NotImplementedError

    def load_count(self, param: torch.Tensor, value: Any) -> None:
        """Of such a parameter."""

    def cast_fp8(self, group: BucketGroup) -> None:
        """Masters of the group's FP8 weights into this rank's parts of them. Unsharded weights are whole afterwards."""
        if not group.fp8_weights:
            return
        if group not in self._casts:
            self._casts[group] = self._casts_of(group)
        for cast in self._casts[group]:
            cast()

    def _casts_of(self, group: BucketGroup) -> list[Callable[[], None]]:
        local = {shard.param: shard for own in self.shards for shard in own if shard.is_fp8 and shard.group is group}
        stepped = {p for param_group in self.param_groups for p in param_group["params"]}
        weights = [p for p in group.fp8_weights if p in stepped]  # the same on all ranks
        if not weights:
            return []
        masters = [local[p].weight if p in local else None for p in weights]
        starts = [local[p].start if p in local else None for p in weights]
        casts = [MasterCasts(weights, masters, starts, group.comm.group).run]
        return casts if group.is_sharded else [*casts, ColumnsOfWeights(weights).make]

    def _chosen(self, number: int, chosen: set[int] | None) -> list[int]:
        shards = self.shards[number]
        return [i for i, shard in enumerate(shards) if chosen is None or id(shard.group) in chosen]


class AdamSteps(Steps):
    counts_by_group = True

    def __init__(self, optimizer: FusedAdam, shards: list[list[Shard]], device: torch.device) -> None:
        super().__init__(optimizer, shards, device)
        groups = [
            {name: value for name, value in group.items() if name not in ("step", "lr")}
            | {"params": [s.weight for s in own]}
            for group, own in zip(self.param_groups, shards)
        ]
        # It keeps the states of the shards, and converts them; it is never stepped.
        self.keeper = FusedAdam(groups, **{name: getattr(optimizer, name) for name in _ADAM_OPTIONS})
        for own in shards:
            for shard in own:
                if not shard.is_fp8:
                    self.keeper.initialize_state(shard.weight)
                    continue
                for name in ("exp_avg", "exp_avg_sq"):  # the weight is its master
                    self.keeper.set_scaled_state(shard.weight, name, torch.zeros_like(shard.weight))
        self._found: dict[tuple, dict] = {}  # of _tensors

    def state_of(self, number: int, index: int) -> dict[str, Any]:
        shard = self.shards[number][index]
        state = {name: self.keeper.get_unscaled_state(shard.weight, name) for name in self.keeper.state[shard.weight]}
        return {**state, MASTER: shard.weight} if shard.is_fp8 else state

    def kept_of(self, number: int, index: int) -> dict[str, Any]:
        shard = self.shards[number][index]
        master = {MASTER: shard.weight} if shard.is_fp8 else {}
        return {**self.keeper.state[shard.weight], **master}

    def scales_of(self, number: int, index: int) -> dict[str, torch.Tensor]:
        return self.keeper._scales.get(self.shards[number][index].weight, {})

    def names_of(self, number: int, param: torch.Tensor) -> dict[str, torch.dtype | None]:
        kept = self.keeper._kept(param)
        return {name: dtype if dtype is torch.int16 else torch.float32 for name, dtype in kept.items()}

    def load_state(self, number: int, index: int, name: str, value: Any) -> None:
        shard = self.shards[number][index]
        if shard.is_fp8 and name == MASTER:
            shard.weight.copy_(value)
        else:
            self.keeper.set_scaled_state(shard.weight, name, value)

    def run(self, chosen: set[int] | None) -> None:
        for number, (group, step) in enumerate(zip(self.param_groups, self.steps)):
            lists = []
            for master, tensors in self._tensors(number, chosen).items():
                lists.append(_C.AdamLists(OP, self.keeper.exp_avg_dtype, self.keeper.exp_avg_sq_dtype, master, _FLOAT))
                lists[-1].add(*tensors, None)
            self._run_lists(group, step, lists)

    def _tensors(self, number: int, chosen: set[int] | None) -> dict[torch.dtype | None, tuple[list, list, list, list]]:
        """Weights, gradients, states and their scales, by the masters' dtype: the same objects in every step."""
        key = number, None if chosen is None else frozenset(chosen)
        if key not in self._found:
            found: dict[torch.dtype | None, tuple[list, list, list, list]] = {}
            for i in self._chosen(number, chosen):
                weight = self.shards[number][i].weight
                state = self.keeper.state[weight]
                one = weight, self.shards[number][i].gradient, state, self.keeper._scales.get(weight)
                lists = found.setdefault(state[MASTER].dtype if MASTER in state else None, ([], [], [], []))
                for each, value in zip(lists, one):
                    each.append(value)
            self._found[key] = found
        return self._found[key]

    def _run_lists(self, group: Mapping[str, Any], step: torch.Tensor, lists: list[_C.AdamLists]) -> None:
        lr, lr_tensor = group["lr"], None
        if isinstance(lr, torch.Tensor) and lr.device == step.device and lr.dtype is torch.float32:
            lr, lr_tensor = 0.0, lr.view(1)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        numbers = float(lr), beta1, beta2, group["eps"], group["weight_decay"], 0
        modes = self.keeper.adam_w_mode, bool(group["bias_correction"])
        for each in lists:
            each.run(*numbers, *modes, self.noop, lr_tensor, step, None, self.clip)


class SGDSteps(Steps):
    """A momentum that no step has written is -0.0, also in files and in other shards: reduced gradients, which begin as
    0.0, are never -0.0 all over."""

    def __init__(self, optimizer: FusedSGD, shards: list[list[Shard]], device: torch.device) -> None:
        super().__init__(optimizer, shards, device)
        self.states = [[self._state(shard, group) for shard in own] for group, own in zip(self.param_groups, shards)]
        self._may_be_first = True

    def state_of(self, number: int, index: int) -> dict[str, Any]:
        return self.states[number][index]

    def names_of(self, number: int, param: torch.Tensor) -> dict[str, torch.dtype | None]:
        return {MOMENTUM: param.dtype} if self.param_groups[number]["momentum"] else {}

    def _state(self, shard: Shard, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {MOMENTUM: torch.full_like(shard.weight, -0.0)} if group["momentum"] else {}

    def load_state(self, number: int, index: int, name: str, value: Any) -> None:
        super().load_state(number, index, name, value)
        self._may_be_first = True

    def begin(self, noop: torch.Tensor, clip: torch.Tensor | None) -> None:
        super().begin(noop, clip)
        # With a buffer of zeros a first step differs from others by its missing dampening alone.
        if self._may_be_first:
            damped = any(group["momentum"] and group["dampening"] for group in self.param_groups)
            self._may_be_first = damped and self._is_untouched()

    def _is_untouched(self) -> bool:
        """Waits on the host."""
        buffers = [state[MOMENTUM] for own in self.states for state in own if state]
        return all(bool(((buffer == 0) & buffer.signbit()).all()) for buffer in buffers)

    def run(self, chosen: set[int] | None) -> None:
        for number, group in enumerate(self.param_groups):
            picked = self._chosen(number, chosen)
            grads = [self.shards[number][i].gradient for i in picked]
            scale_gradients(grads, self.clip)
            weights = [self.shards[number][i].weight for i in picked]
            buffers = [self.states[number][i][MOMENTUM] for i in picked] if group["momentum"] else []
            optimizer_sgd(
                [_laid_out(grad, weight) for grad, weight in zip(grads, weights)],
                weights,
                buffers,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                first_run=self._may_be_first,
                wd_after_momentum=self.optimizer.wd_after_momentum,
                noop=self.noop,
            )


def _laid_out(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In the order of the weight's memory, such as channels_last: main_grad is contiguous."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


class TorchSteps(Steps):
    """torch's own optimizer of float32 shards: the weights, or masters of them."""

    by_groups = False

    def __init__(self, optimizer: torch.optim.Optimizer, shards: list[list[Shard]], device: torch.device) -> None:
        super().__init__(optimizer, shards, device)
        self.masters = [
            [s.weight if s.weight.dtype is torch.float32 else s.weight.float() for s in own] for own in shards
        ]
        groups = [{**group, "params": list(own)} for group, own in zip(self.param_groups, self.masters)]
        self.own = type(optimizer)(groups)
        self.counts: dict[torch.Tensor, torch.Tensor] = {}  # of parameters without a shard here, as torch keeps them
        for group, own, masters in zip(self.param_groups, self.shards, self.masters):
            for master in masters:
                self._make_state(master, group)
            local = {shard.param for shard in own}
            if "betas" in group:
                self.counts |= {p: torch.zeros((), dtype=torch.float32) for p in group["params"] if p not in local}

    def state_of(self, number: int, index: int) -> dict[str, Any]:
        master = self.masters[number][index]
        beside = {} if master is self.shards[number][index].weight else {MASTER: master}
        return {**self.own.state[master], **beside}

    def names_of(self, number: int, param: torch.Tensor) -> dict[str, torch.dtype | None]:
        group, full = self.param_groups[number], torch.float32
        names: dict[str, torch.dtype | None] = {}
        if "betas" in group:
            names = {"step": None, "exp_avg": full, "exp_avg_sq": full}
            names |= {"max_exp_avg_sq": full} if group.get("amsgrad") else {}
        elif group["momentum"]:
            names = {MOMENTUM: full}
        return names if param.dtype is full else {**names, MASTER: full}

    def _make_state(self, master: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.own.state[master]
        if "betas" in group:
            device = master.device if group.get("capturable") or group.get("fused") else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group.get("amsgrad") else [])
            state.update({name: torch.zeros_like(master) for name in names})
        elif group["momentum"]:  # zeros do what torch does without a buffer
            state[MOMENTUM] = torch.zeros_like(master)

    def load_state(self, number: int, index: int, name: str, value: Any) -> None:
        super().load_state(number, index, name, value)
        if name == "step":
            self.steps[number].fill_(int(value))

    def count_of(self, param: torch.Tensor) -> torch.Tensor:
        return self.counts[param].clone()

    def load_count(self, param: torch.Tensor, value: Any) -> None:
        if param in self.counts:
            self.counts[param].fill_(float(value))

    def run(self, chosen: set[int] | None) -> None:
        if float(self.noop):  # torch's steps are not skipped on the device
            return
        for group, own in zip(self.param_groups, self.own.param_groups):
            own.update({name: value for name, value in group.items() if name != "params"})
        for shards, masters in zip(self.shards, self.masters):
            scale_gradients([shard.gradient for shard in shards], self.clip)
            for shard, master in zip(shards, masters):
                master.grad = shard.gradient.float()
        self.own.step()
        for count in self.counts.values():
            count.add_(1.0)
        for shards, masters in zip(self.shards, self.masters):
            for shard, master in zip(shards, masters):
                master.grad = None
                if master is not shard.weight:
                    shard.weight.copy_(master)


def scale_gradients(gradients: Tensors, factor: torch.Tensor | None) -> None:
    """In place, for optimizers whose pass takes no factor from the device."""
    if factor is not None and gradients:
        optimizer_scale(gradients, gradients, factor)


_STEPS: dict[type, type[Steps]] = {
    FusedAdam: AdamSteps,
    FusedSGD: SGDSteps,
    torch.optim.Adam: TorchSteps,
    torch.optim.AdamW: TorchSteps,
    torch.optim.SGD: TorchSteps,
}


def steps_of(optimizer: Any, shards: list[list[Shard]], device: torch.device) -> Steps:
    """Errors: NotImplementedError for an optimizer that is not known to act on each element by itself."""
    kind = _STEPS.get(type(optimizer))
    if kind is None:
        raise NotImplementedError(
            f"{OP}: argument 'optimizer' is a {type(optimizer).__name__}, wanted one of "
            f"{', '.join(known.__name__ for known in _STEPS)}: shards of a parameter are stepped apart, which is right "
            "only where each element is stepped by itself. Others, such as those of whole matrices, step main_grad of "
            "a wrapper that shards nothing, after finish_grad_sync()."
        )
    if optimizer.state:
        raise ValueError(
            f"{OP}: argument 'optimizer' has states already, wanted one that has taken no step; load them by "
            "load_state_dict() of the DistributedOptimizer."
        )
    if isinstance(optimizer, torch.optim.SGD) and any(group["dampening"] for group in optimizer.param_groups):
        raise ValueError(
            f"{OP}: argument 'optimizer' is a torch.optim.SGD with dampening, which has no momentum "
            "to load before its first step: use FusedSGD."
        )
    fp8 = any(fp8_weights.is_fp8(p) for group in optimizer.param_groups for p in group["params"])
    masters = getattr(optimizer, "master_weights", False) and optimizer.master_weight_dtype is torch.float32
    if fp8 and not masters:
        raise ValueError(
            f"{OP}: argument 'optimizer' is a {type(optimizer).__name__} without float32 masters of weights that are "
            "held in FP8, wanted FusedAdam(master_weights=True)."
        )
    if kind is not TorchSteps:
        for shard in (shard for own in shards for shard in own):
            _check_no_gaps(shard, optimizer)
    return kind(optimizer, shards, device)


def _check_no_gaps(shard: Shard, optimizer: Any) -> None:
    like = torch.empty_like(shard.weight, device="meta")
    if shard.weight.stride() != like.stride():
        raise ValueError(
            f"{OP}: parameter '{shard.group.names[shard.param]}' has strides {shard.weight.stride()}, wanted "
            f"{like.stride()}, without gaps, for {type(optimizer).__name__}; make it contiguous before the wrapping."
        )
