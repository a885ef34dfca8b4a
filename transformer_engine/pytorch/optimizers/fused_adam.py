"""FusedAdam: Adam and AdamW with states and master weights of several formats, each step one pass over memory for all
parameters of a group. Options of groups: adam_groups.py; a step: adam_step.py; formats of states: adam_states.py.
No AMSGrad, no sparse gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import disable_dynamo
from transformer_engine.pytorch.distributed.dtensor import local_of
from transformer_engine.pytorch.optimizers import adam_states as states
from transformer_engine.pytorch.optimizers.adam_groups import OP, check_group, put_on_device, refuse_amsgrad
from transformer_engine.pytorch.optimizers.adam_states import EXP_AVG, EXP_AVG_SQ, MASTER
from transformer_engine.pytorch.optimizers.adam_step import Step
from transformer_engine.pytorch.optimizers.adam_torch import for_torch, from_torch, is_torchs
from transformer_engine.pytorch.optimizers.fused_optimizer import FusedOptimizer
from transformer_engine.pytorch.optimizers.old_order import in_todays_order
from transformer_engine.pytorch.optimizers.stacked_states import with_stacks
from transformer_engine.pytorch.tensor import QuantizedTensor


class _Saved:
    """A state that passes through torch's load_state_dict, which would cast it to its parameter's dtype."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self.state = state


class FusedAdam(FusedOptimizer):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr (m / c1) / (sqrt(v / c2) + eps), c = 1 - b^step or 1.

    adam_w_mode: weight decay in the update (AdamW), or in the gradient. A group counts its own `step`.
    master_weights: each parameter has a master of master_weight_dtype (float32, float16), which is stepped; the
    parameter is the rounded master. Quantized parameters need them. store_param_remainders: bfloat16 parameters with
    float32 masters store the 16 bits that float32 has beyond them instead of the master; no effect on others.
    exp_avg_dtype, exp_avg_sq_dtype: float32, float16, bfloat16 or uint8 (E4M3, which needs float32 masters or weights);
    float16 and uint8 have a scale for each tensor. state_dict() holds float32, remainders int16.
    capturable: step (int32) and lr (float32) are tensors on the GPU, like GradScaler's factor and verdict: a step waits
    for nothing, can be captured, and changes nothing if it finds Inf or NaN.
    use_decoupled_grad: gradients are read from parameter.decoupled_grad.

    Parameters without a gradient are skipped. Errors: ValueError naming the mismatch, NotImplementedError for amsgrad;
    weights and states are unchanged then."""

    _op = OP

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse_amsgrad(OP, amsgrad)
        self.adam_w_mode, self.capturable = bool(adam_w_mode), bool(capturable)
        self.master_weights, self.master_weight_dtype = bool(master_weights), master_weight_dtype
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.use_decoupled_grad = bool(use_decoupled_grad)
        self.store_param_remainders = bool(store_param_remainders)
        self._step_supports_amp_scaling = self.capturable
        self._check_options()
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._forget()
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay}, set_grad_none)

    _OPTIONS = (
        "adam_w_mode",
        "capturable",
        "master_weights",
        "master_weight_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "use_decoupled_grad",
        "set_grad_none",
        "store_param_remainders",
        "_step_supports_amp_scaling",
        "_scales",
    )

    def _check_options(self) -> None:
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(self, name) not in states.MOMENTS:
                raise ValueError(
                    f"{OP}: argument '{name}' is {getattr(self, name)!r}, wanted float32, float16, bfloat16 or uint8."
                )
        master = self.master_weight_dtype
        if self.master_weights and master not in states.MASTERS:
            raise ValueError(f"{OP}: argument 'master_weight_dtype' is {master!r}, wanted float32 or float16.")
        if self._has_fp8_moments() and self.master_weights and master is not torch.float32:
            raise ValueError(f"{OP}: argument 'master_weight_dtype' is {master} with FP8 moments, wanted float32.")

    def _has_fp8_moments(self) -> bool:
        return torch.uint8 in (self.exp_avg_dtype, self.exp_avg_sq_dtype)

    def _forget(self) -> None:
        """Drops everything that was derived from former parameters and states."""
        self._sorted: dict[int, tuple] = {}
        self._lrs: dict[int, torch.Tensor] = {}
        self._guard = _C.OverlapGuard()

    # ---- groups ----

    def _check_added(self) -> None:
        check_group(OP, self.param_groups[-1])
        if self.capturable:
            put_on_device(self.param_groups, len(self.param_groups) - 1, self._lrs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """set_to_none: gradients become None (the default), not 0; decoupled ones too."""
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for p in (p for group in self.param_groups for p in group["params"]):
            if getattr(p, "decoupled_grad", None) is None or self._sets_to_none(set_to_none):
                p.decoupled_grad = None
            else:
                p.decoupled_grad = p.decoupled_grad.detach().zero_()

    # ---- the step ----

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step of all groups; returns the result of closure(), which runs first. grad_scaler: torch's GradScaler
        passes itself to a capturable optimizer, which then unscales the gradients in place and skips the step if one of
        them is Inf or NaN; attributes `grad_scale` and `found_inf` do the same."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Step(self, grad_scaler).run()
        return loss

    # ---- states ----

    def _kept(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """State's name -> its dtype in memory."""
        kept = {EXP_AVG: self.exp_avg_dtype, EXP_AVG_SQ: self.exp_avg_sq_dtype}
        if self.master_weights:
            master_dtype = self.master_weight_dtype
            remainder = (
                self.store_param_remainders and master_dtype is torch.float32 and _has_remainder(local_of(param))
            )
            kept[MASTER] = torch.int16 if remainder else master_dtype
        return kept

    def _check_param(self, param: torch.Tensor) -> None:
        local = local_of(param)
        dense = local.layout is torch.strided
        if dense and any(n > 1 and stride == 0 for n, stride in zip(local.shape, local.stride())):
            raise ValueError(
                f"{OP}: a parameter {list(param.shape)} has strides {local.stride()}, wanted separate memory for each "
                "element; make it of t.clone(), not of an expanded tensor."
            )
        if self.master_weights:
            return
        if isinstance(local, QuantizedTensor):
            raise ValueError(
                f"{OP}: a parameter {list(param.shape)} is a {type(local).__name__}, wanted master_weights=True: steps "
                "smaller than its resolution would be lost."
            )
        if self._has_fp8_moments() and local.dtype is not torch.float32:
            raise ValueError(
                f"{OP}: exp_avg_dtype={self.exp_avg_dtype}, exp_avg_sq_dtype={self.exp_avg_sq_dtype} with a parameter "
                f"of {local.dtype}, wanted master_weights=True: FP8 moments go with float32 masters or weights."
            )

    def _initial_state(
        self, param: torch.Tensor, kept: Mapping[str, torch.dtype]
    ) -> tuple[states.State, dict[str, torch.Tensor]]:
        """A new state of param, and its scales; the optimizer itself stays unchanged."""
        self._check_param(param)
        state, scales = {}, {}
        for name, dtype in kept.items():
            state[name], pair = states.new_state(param, dtype)
            if pair is not None:
                scales[name] = pair
            if name == MASTER and dtype is not torch.int16:
                states.write(name, state[name], pair, states.first_master(param))
        return state, scales

    @torch.no_grad()
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Makes a new state for a parameter: moments of 0, a master of its values. A step does it for a parameter
        without one. store_param_remainders: by default the optimizer's."""
        kept = self._kept(param)
        if store_param_remainders and not self.store_param_remainders:
            raise ValueError(
                f"{OP}.initialize_state: argument 'store_param_remainders' is True, wanted an optimizer that was made "
                "with store_param_remainders=True: a step needs states in the optimizer's format."
            )
        if store_param_remainders is False and MASTER in kept:
            kept[MASTER] = self.master_weight_dtype
        self.state[param], self._scales[param] = self._initial_state(param, kept)
        self._sorted.clear()

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A state in float32; the tensor itself if it is float32 in memory. Remainders are int16."""
        state = self.state.get(param) or {}
        if state_name not in state:
            raise ValueError(f"{OP}.get_unscaled_state: there is no '{state_name}', wanted one of {sorted(state)}.")
        return states.read(state[state_name], self._scales.get(param, {}).get(state_name))

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Sets a state, which is made if there is none, to these values, in its dtype in memory."""
        kept = self._kept(param)
        if state_name not in kept:
            raise ValueError(f"{OP}.set_scaled_state: argument 'state_name' is {state_name!r}, wanted {sorted(kept)}.")
        state = self.state.get(param) or {}
        dtype = state[state_name].dtype if state_name in state else kept[state_name]
        states.check_value(f"{OP}.set_scaled_state", f"'{state_name}'", param, unscaled_state, dtype)
        if state_name not in state:
            self._check_param(param)
            state[state_name], pair = states.new_state(param, dtype)
            self.state[param] = state
            if pair is not None:
                self._scales.setdefault(param, {})[state_name] = pair
        value = state[state_name]
        given = states.apart(unscaled_state, value, {states.memory_key(value)})
        states.write(state_name, value, self._scales.get(param, {}).get(state_name), given)

    # ---- checkpoints, copies ----

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with every state in float32 (remainders int16)."""
        handle = self.register_state_dict_post_hook(_unscaled, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch.no_grad()
    def torch_state_dict(self) -> dict[str, Any]:
        """In the form of torch.optim.AdamW (with adam_w_mode=False: Adam), on copies. Without masters, which those do
        not have. Errors: ValueError for bias_correction=False, which they do not have."""
        modes = {"adam_w_mode": self.adam_w_mode, "capturable": self.capturable}
        return for_torch(f"{OP}.torch_state_dict", self.state_dict(), **modes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of state_dict(), of an optimizer with states of any dtype, or of torch.optim.AdamW
        (adam_w_mode=False: Adam), with masters of the present weights. Existing states keep their memory. Errors:
        ValueError for states of another shape, dtype or set of names, and for groups in which torch's optimizer has
        made different numbers of steps; nothing is changed then."""
        handle = self.register_load_state_dict_pre_hook(_left_as_it_is)
        try:
            state_dict = with_stacks(f"{OP}.load_state_dict", self.param_groups, state_dict)
            super().load_state_dict(in_todays_order(self, state_dict))
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._OPTIONS}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = {p: s.state for p, s in state["state"].items() if isinstance(s, _Saved) and s.state}
        op = f"{OP}.load_state_dict"
        index = {p: i for i, p in enumerate(p for group in state["param_groups"] for p in group["params"])}
        for p, given in loaded.items():
            self._check_param(p)
            states.check_loaded(op, index.get(p), p, given, self._kept(p))
        for group in state["param_groups"]:
            check_group(op, group)
        before = getattr(self, "param_groups", [])
        old, old_scales = getattr(self, "state", {}), getattr(self, "_scales", {})
        rest = {p: s for p, s in state["state"].items() if not isinstance(s, _Saved)}
        super().__setstate__(state | {"state": defaultdict(dict, rest)})
        self._forget()
        for i in range(len(self.param_groups) if self.capturable else 0):
            put_on_device(self.param_groups, i, self._lrs, before[i] if i < len(before) else None)
        places = {p: self._places(p, old.get(p) or {}, old_scales.get(p, {})) for p in loaded}
        written = {states.memory_key(value) for place in places.values() for value, _ in place.values()}
        for p, given in loaded.items():  # states that swap memory are read before they are written
            loaded[p] = {name: states.apart(given[name], value, written) for name, (value, _) in places[p].items()}
        for p, given in loaded.items():
            self.state[p], self._scales[p] = {}, {}
            for name, (value, pair) in places[p].items():
                states.write(name, value, pair, given[name])
                self.state[p][name] = value
                if pair is not None:
                    self._scales[p][name] = pair

    def _places(
        self, param: torch.Tensor, state: states.State, scales: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """The destination of a loaded state of param, with its scale: the memory of the former one if it fits."""
        places = {}
        for name, dtype in self._kept(param).items():
            value, pair = state.get(name), scales.get(name)
            if value is None or value.dtype is not dtype or not states.lies_as(value, param):
                value, pair = states.new_state(param, dtype)
            places[name] = value, pair
        return places

    def _master_for(self, place: int) -> torch.Tensor | None:
        """Of the parameter with that index among all, for a state without one."""
        params = [p for group in self.param_groups for p in group["params"]]
        kept = self._kept(params[place]).get(MASTER) if place < len(params) else None
        if kept is None:
            return None
        local = local_of(params[place])
        return torch.zeros_like(local, dtype=kept) if kept is torch.int16 else states.first_master(params[place])


def _has_remainder(local: torch.Tensor) -> bool:
    return local.dtype is torch.bfloat16 and not isinstance(local, QuantizedTensor)


@torch.no_grad()
def _left_as_it_is(optimizer: FusedAdam, state_dict: dict[str, Any]) -> dict[str, Any]:
    if is_torchs(state_dict):
        op = f"{OP}.load_state_dict"
        state_dict = from_torch(op, state_dict, optimizer.adam_w_mode, optimizer._master_for)
    given = state_dict["state"].items()
    return state_dict | {"state": {k: _Saved(s) if isinstance(s, Mapping) else s for k, s in given}}


@torch.no_grad()
def _unscaled(optimizer: FusedAdam, state_dict: dict[str, Any]) -> dict[str, Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def shown(key: object, state: object) -> object:
        if not isinstance(key, int) or not isinstance(state, dict):
            return state
        scales = optimizer._scales.get(params[key], {})
        names = (EXP_AVG, EXP_AVG_SQ, MASTER)
        return {n: states.read(t, scales.get(n)) if n in names else t for n, t in state.items()}

    return state_dict | {"state": {key: shown(key, state) for key, state in state_dict["state"].items()}}
