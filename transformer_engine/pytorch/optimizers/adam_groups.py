"""Options of a group of parameters: invalid ones are refused, and a capturable optimizer's step and lr are placed on
the group's device. Nothing is stepped here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch.distributed.dtensor import local_of

OP = "FusedAdam"


def refuse_amsgrad(op: str, amsgrad: object) -> None:
    if amsgrad:
        raise NotImplementedError(
            f"{op}: argument 'amsgrad' is True, but AMSGrad is not available in this version; use "
            "torch.optim.AdamW(amsgrad=True)."
        )


def check_has(op: str, group: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError for a group without one of these, NotImplementedError for one that maximizes."""
    missing = [name for name in names if name not in group]
    if missing:
        raise ValueError(f"{op}: a group has no {missing}, wanted {list(names)}; optimizer.defaults has them.")
    if group.get("maximize"):
        raise NotImplementedError(
            f"{op}: a group's 'maximize' is True, but steps go down in this version; negate the loss."
        )


def check_group(op: str, group: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid option, NotImplementedError for one of another optimizer."""
    check_has(op, group, "lr", "bias_correction", "betas", "eps", "weight_decay")
    refuse_amsgrad(op, group.get("amsgrad"))
    for name, at_least in (("lr", -math.inf), ("eps", 0.0), ("weight_decay", -math.inf)):
        value = group[name]
        if name == "lr" and isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"{op}: argument 'lr' has shape {list(value.shape)}, wanted one element.")
        elif not (isinstance(value, (int, float)) and value >= at_least):
            raise ValueError(
                f"{op}: argument '{name}' is {value!r}, wanted a number{' >= 0' if name == 'eps' else ''}."
            )
    step = group.get("step", 0)
    if not ((isinstance(step, torch.Tensor) and step.numel() == 1) or (isinstance(step, (int, float)) and step >= 0)):
        raise ValueError(f"{op}: a group's 'step' is {step!r}, wanted the number of its past steps.")
    betas = group["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0.0 <= float(beta) < 1.0 for beta in betas)):
        raise ValueError(f"{op}: argument 'betas' is {betas!r}, wanted two numbers in [0, 1).")


def _is_capturable_on(device: torch.device) -> bool:
    return device.type in ("cuda", "meta")


def device_of(group: Mapping[str, Any], lr: Any) -> torch.device:
    """The device of a capturable group's step and lr. lr: the present one, which a group without parameters keeps.
    Errors: ValueError for a CPU tensor, and for several devices."""
    devices = {local_of(p).device for p in group["params"]}
    for device in devices:
        if not _is_capturable_on(device):
            raise ValueError(f"{OP}: argument 'capturable' is True with a parameter on {device}, wanted CUDA tensors.")
    if len(devices) > 1:
        raise ValueError(
            f"{OP}: argument 'capturable' is True with a group on {sorted(map(str, devices))}, wanted one device a "
            "group for its step and lr; make a group for each."
        )
    if devices:
        return devices.pop()
    if isinstance(lr, torch.Tensor):
        return lr.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def put_on_device(
    groups: Sequence[dict[str, Any]], index: int, lrs: dict[int, torch.Tensor], before: Mapping[str, Any] | None = None
) -> None:
    """Makes the lr and step of a capturable optimizer's group tensors on its device. A number becomes the value of the
    former tensor: captured steps read that. lrs: those of all groups, as the optimizer placed them; before: the group
    that a loaded one replaces."""
    group, kept = groups[index], lrs.get(index)
    lr, step = group["lr"], group.get("step", 0)
    param_device = group["params"] and local_of(group["params"][0]).device
    if lr is kept and isinstance(step, torch.Tensor) and param_device in (lr.device, []):
        return
    old = before or {"lr": kept, "step": None}
    device = device_of(group, old["lr"])
    if device.type == "meta":  # without memory yet
        return
    if stream_captures():
        raise ValueError(
            f"{OP}: a group's 'lr' is {lr!r} while a step is being captured, wanted the tensor that the optimizer has "
            "placed in the group, with its value set before the capture: group['lr'].fill_(...)."
        )
    loaded = before is not None
    group["lr"] = lrs[index] = _one(lr, old["lr"], torch.float32, device, loaded)
    group["step"] = _one(step, old.get("step"), torch.int32, device, loaded)


def _one(value: Any, old: Any, dtype: torch.dtype, device: torch.device, loaded: bool) -> torch.Tensor:
    """value as a tensor: itself; or for a number or a loaded value, old's memory with that value."""
    reusable = isinstance(old, torch.Tensor) and old.dtype is dtype and old.device == device
    if isinstance(value, torch.Tensor):
        value = value.view(1) if dtype is torch.int32 and value.dim() == 0 else value
        if loaded and reusable:
            return old.copy_(value.view_as(old))
        return value.to(device, dtype).clone() if loaded else value.to(device, dtype)
    return old.fill_(value) if reusable else torch.tensor([value], dtype=dtype, device=device)
