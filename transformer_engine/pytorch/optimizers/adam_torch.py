"""State dicts of torch.optim.Adam and AdamW in FusedAdam's form, and FusedAdam's in theirs. Theirs count a step for
each parameter and keep no masters; FusedAdam counts one for a group. Nothing is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from transformer_engine.pytorch.optimizers.adam_groups import check_has, refuse_amsgrad
from transformer_engine.pytorch.optimizers.adam_states import EXP_AVG, EXP_AVG_SQ, MASTER

STEP = "step"
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# Options of their groups that select an implementation of torch's step, not a result.
_OF_TORCH = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def is_torchs(state_dict: Mapping[str, Any]) -> bool:
    return any("amsgrad" in group and "bias_correction" not in group for group in state_dict["param_groups"])


def from_torch(
    op: str, state_dict: dict[str, Any], adam_w_mode: bool, master_of: Callable[[int], torch.Tensor | None]
) -> dict[str, Any]:
    """The state dict in FusedAdam's form, on the same tensors. master_of: index of a parameter among all -> its master,
    or None, because torch has none. Errors: ValueError, NotImplementedError for options that FusedAdam does not
    have."""
    states = state_dict["state"]
    groups = [_group_from_torch(op, i, g, states, adam_w_mode) for i, g in enumerate(state_dict["param_groups"])]
    result = dict(states)
    for place, key in enumerate(key for group in groups for key in group["params"]):
        if not states.get(key):
            continue
        result[key] = {name: value for name, value in states[key].items() if name != STEP}
        master = master_of(place)
        if master is not None and MASTER not in result[key]:
            result[key][MASTER] = master
    return {**state_dict, "state": result, "param_groups": groups}


def _group_from_torch(
    op: str, index: int, group: Mapping[str, Any], states: Mapping[Any, Any], adam_w_mode: bool
) -> dict[str, Any]:
    refuse_amsgrad(op, group["amsgrad"])
    check_has(op, group, "lr", "betas", "eps", "weight_decay")
    decoupled = group.get("decoupled_weight_decay", adam_w_mode)
    if group["weight_decay"] and bool(decoupled) is not adam_w_mode:
        raise ValueError(
            f"{op}: group {index} is torch.optim.{'AdamW' if decoupled else 'Adam'}'s with weight_decay="
            f"{group['weight_decay']}, wanted an optimizer with adam_w_mode={bool(decoupled)}."
        )
    steps = sorted({int(states[key][STEP]) for key in group["params"] if STEP in (states.get(key) or {})})
    if len(steps) > 1:
        raise ValueError(
            f"{op}: the parameters of group {index} have taken {steps[0]} to {steps[-1]} steps, wanted equal numbers: "
            "FusedAdam counts the steps of a group; make groups of parameters with equal numbers of steps."
        )
    result = {name: value for name, value in group.items() if name not in _OF_TORCH}
    return result | {"bias_correction": True} | ({STEP: steps[0]} if steps else {})


def for_torch(op: str, state_dict: dict[str, Any], *, adam_w_mode: bool, capturable: bool) -> dict[str, Any]:
    """FusedAdam's state dict in the form of torch's AdamW or Adam, on copies: a step of either changes only its own."""
    states, groups = {}, []
    for index, group in enumerate(state_dict["param_groups"]):
        if not group["bias_correction"]:
            raise ValueError(f"{op}: group {index} has bias_correction=False, wanted True: torch always corrects.")
        steps = group.get(STEP, 0)
        for key in group["params"]:
            state = state_dict["state"].get(key)
            if state:
                device = state[EXP_AVG].device if capturable else "cpu"
                count = torch.full((), float(steps), dtype=torch.float32, device=device)
                states[key] = {STEP: count, **{name: state[name].clone() for name in _MOMENTS}}
        kept = {name: value for name, value in group.items() if name not in (STEP, "bias_correction")}
        lr = kept["lr"]
        kept["lr"] = lr.detach().clone().view(()) if isinstance(lr, torch.Tensor) else lr
        groups.append(kept | {"decoupled_weight_decay": adam_w_mode, "capturable": capturable})
    return {"state": states, "param_groups": groups}
