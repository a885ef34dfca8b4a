"""FusedSGD: SGD with momentum, a pass over memory for all parameters of a group. No master weights, so no quantized
parameters; no sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch._internal.torch_private import disable_dynamo
from transformer_engine.pytorch.distributed.dtensor import local_grad, local_of
from transformer_engine.pytorch.functional import optimizer_sgd
from transformer_engine.pytorch.optimizers.adam_groups import check_has
from transformer_engine.pytorch.optimizers.adam_states import new_state
from transformer_engine.pytorch.optimizers.fused_optimizer import FusedOptimizer
from transformer_engine.pytorch.optimizers.old_order import in_todays_order
from transformer_engine.pytorch.optimizers.stacked_states import with_stacks
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.registry import FLOATS

OP = "FusedSGD"
BUFFER = "momentum_buffer"


class _Lists(NamedTuple):
    """The tensors that one call steps. first_run: the buffers are uninitialised."""

    group: dict[str, Any]
    first_run: bool
    grads: list[torch.Tensor]
    params: list[torch.Tensor]
    buffers: list[torch.Tensor]


class FusedSGD(FusedOptimizer):
    """b = momentum b + (1 - dampening) g, g in a parameter's first step; p -= lr b, with nesterov lr (g + momentum b).

    weight_decay is added to g, or, with wd_after_momentum, to the update. materialize_master_grads: for tools of mixed
    precision with masters; it changes nothing here. Arithmetic is float32; buffers have their parameter's dtype.
    Errors: ValueError naming the mismatch; weights and states are unchanged then."""

    _op = OP

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        self.wd_after_momentum, self.materialize_master_grads = bool(wd_after_momentum), bool(materialize_master_grads)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov}, set_grad_none)

    def _check_added(self) -> None:
        _check_group(self.param_groups[-1])

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups; returns the result of closure(), which runs first."""
        for name in ("found_inf", "grad_scale"):
            if getattr(self, name, None) is not None:
                raise ValueError(
                    f"{OP}: attribute '{name}' is set, which this optimizer does not read; delete it, and skip a step "
                    "yourself (`if not float(found_inf): optimizer.step()`), or use FusedAdam or torch's fused=True "
                    "optimizers, which read it."
                )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        new: dict[torch.Tensor, torch.Tensor] = {}
        calls = [lists for group in self.param_groups for lists in self._lists_of(group, new)]
        if len(calls) > 1:  # a single call checks itself
            _check_overlaps(calls)
        for p, buffer in new.items():
            self.state[p][BUFFER] = buffer
        for group, first_run, grads, params, buffers in calls:
            optimizer_sgd(
                grads,
                params,
                buffers,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                first_run=first_run,
                wd_after_momentum=self.wd_after_momentum,
            )
        return loss

    def _lists_of(self, group: dict[str, Any], new: dict[torch.Tensor, torch.Tensor]) -> list[_Lists]:
        _check_group(group)
        calls = [_Lists(group, first_run, [], [], []) for first_run in (True, False)]
        for i, p in enumerate(group["params"]):
            grad = local_grad(p.grad, p)
            if grad is None:
                continue
            weight = local_of(p)
            grad = _checked(i, weight, grad)
            buffer = (self.state.get(p) or {}).get(BUFFER)
            lists = calls[buffer is not None or not group["momentum"]]
            if group["momentum"]:
                if buffer is None:
                    buffer, _ = new_state(p, weight.dtype)
                    new[p] = buffer
                else:
                    _check_buffer(i, weight, local_of(buffer))
                lists.buffers.append(local_of(buffer))
            lists.grads.append(grad)
            lists.params.append(weight)
        return [lists for lists in calls if lists.params]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. A buffer with the layout of the gradients that it was made from is converted to its
        parameter's."""
        state_dict = with_stacks(f"{OP}.load_state_dict", self.param_groups, state_dict)
        super().load_state_dict(in_todays_order(self, state_dict))
        for p, state in self.state.items():
            buffer, weight = state.get(BUFFER), local_of(p)
            if type(buffer) is torch.Tensor and buffer.shape == weight.shape and buffer.stride() != weight.stride():
                state[BUFFER] = torch.empty_like(weight, dtype=buffer.dtype, device=buffer.device).copy_(buffer)

    def __getstate__(self) -> dict[str, Any]:
        own = ("wd_after_momentum", "materialize_master_grads", "set_grad_none")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


def _check_group(group: dict[str, Any]) -> None:
    check_has(OP, group, "lr", "momentum", "dampening", "weight_decay", "nesterov")
    for name in ("lr", "momentum", "dampening", "weight_decay"):
        value = group[name]
        if isinstance(value, torch.Tensor) and name == "lr" and value.numel() == 1:
            continue
        if not isinstance(value, (int, float)) or value != value or (value < 0 and name != "dampening"):
            words = "a number" if name == "dampening" else "a number >= 0"
            raise ValueError(f"{OP}: argument '{name}' is {value!r}, wanted {words}.")
    if group["nesterov"] and (not group["momentum"] or group["dampening"]):
        raise ValueError(
            f"{OP}: argument 'nesterov' is True with momentum={group['momentum']} and dampening={group['dampening']}, "
            "wanted a momentum, and a dampening of 0."
        )


def _check_overlaps(calls: list[_Lists]) -> None:
    """Raises ValueError if memory that one call writes also belongs to another tensor."""
    spans = []
    for call in calls:
        for name, tensors in (("grad", call.grads), ("param", call.params), ("momentum_buffer", call.buffers)):
            spans += [(t.data_ptr(), t.numel() * t.element_size(), name, i) for i, t in enumerate(tensors) if t.numel()]
    end, written_end, last = 0, 0, None  # of all tensors, of the written ones
    for begin, size, name, i in sorted(spans):
        if begin < (written_end if name == "grad" else end):
            raise ValueError(
                f"{OP}: '{last[0]}' {last[1]} and '{name}' {i} overlap in memory, wanted tensors of their own; clone() "
                "one of them."
            )
        if begin + size > end:
            end, last = begin + size, (name, i)
        if name != "grad":
            written_end = max(written_end, begin + size)


def _check_buffer(i: int, weight: torch.Tensor, buffer: object) -> None:
    """Raises ValueError unless it has its weight's layout."""
    if not isinstance(buffer, torch.Tensor) or buffer.layout is not torch.strided:
        raise ValueError(f"{OP}: '{BUFFER}' {i} is {buffer!r}, wanted a dense tensor.")
    if buffer.shape != weight.shape or buffer.dtype not in FLOATS or buffer.device != weight.device:
        raise ValueError(
            f"{OP}: '{BUFFER}' {i} is {buffer.dtype} {list(buffer.shape)} on {buffer.device}, wanted {weight.dtype} "
            f"{list(weight.shape)} on {weight.device}."
        )
    if buffer.stride() != weight.stride() and not (buffer.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"{OP}: '{BUFFER}' {i} has strides {buffer.stride()}, wanted {weight.stride()}.")


def _checked(i: int, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient, in its weight's layout. Raises ValueError for an invalid one."""
    if isinstance(weight, QuantizedTensor):
        raise ValueError(
            f"{OP}: parameter {i} is a {type(weight).__name__}, wanted a plain tensor: without masters, steps smaller "
            "than its resolution would be lost; use FusedAdam(master_weights=True)."
        )
    for what, t in ((f"parameter {i}", weight), (f"the gradient of parameter {i}", grad)):
        if t.layout is not torch.strided:
            raise ValueError(
                f"{OP}: {what} has layout {t.layout}, wanted a dense one; make the layer with sparse=False."
            )
        if t.dtype not in FLOATS or t.shape != weight.shape or t.device != weight.device or t.is_meta:
            raise ValueError(
                f"{OP}: {what} is {t.dtype} {list(t.shape)} on {t.device}, wanted float32, float16 or bfloat16 "
                f"{list(weight.shape)} on {'a device' if t.is_meta else weight.device}."
            )
        if t.numel() and t.untyped_storage().nbytes() < (t.storage_offset() + t.numel()) * t.element_size():
            last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
            if t.untyped_storage().nbytes() < (last + 1) * t.element_size():  # an expanded one has fewer elements there
                raise ValueError(f"{OP}: {what} has no memory, its storage was freed; allocate it again first.")
    like = torch.empty_like(weight, device="meta")
    if weight.stride() != like.stride():
        raise ValueError(f"{OP}: parameter {i} has strides {weight.stride()}, wanted {like.stride()}, without gaps.")
    laid_out = grad.stride() == weight.stride() or weight.numel() == 0
    return grad if laid_out and not grad.is_neg() else torch.empty_like(weight).copy_(grad)
