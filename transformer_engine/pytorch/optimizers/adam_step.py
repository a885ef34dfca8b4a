"""A step of FusedAdam: parameters are sorted by the kind of their step, everything is checked, then everything is
written. The extension alone checks plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch.amp.grad_scaler import OptState

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.distributed.dtensor import is_sharded, local_grad, local_of
from transformer_engine.pytorch.functional import optimizer_count_step
from transformer_engine.pytorch.optimizers.adam_groups import OP, check_group, put_on_device
from transformer_engine.pytorch.optimizers.adam_rows import StepOfRows
from transformer_engine.pytorch.optimizers.adam_states import MASTER, State
from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor, QuantizedTensor, engine, layout
from transformer_engine.pytorch.tensor.many import quantize_all

_ROUNDED_BYTES = 64 << 20  # of masters that are rounded to their weights' dtype together


class Adam(Protocol):
    """The members of the optimizer that a step uses."""

    param_groups: list[dict[str, Any]]
    state: Mapping[torch.Tensor, State]
    capturable: bool
    adam_w_mode: bool
    use_decoupled_grad: bool
    exp_avg_dtype: torch.dtype
    exp_avg_sq_dtype: torch.dtype
    _scales: dict[torch.Tensor, dict[str, torch.Tensor]]  # of states, by parameter and name
    _lrs: dict[int, torch.Tensor]  # of a capturable one, by the group's number
    _sorted: dict[int, _Sorted]  # by the group's id
    _guard: _C.OverlapGuard

    def _kept(self, param: torch.Tensor) -> dict[str, torch.dtype]: ...

    def _check_param(self, param: torch.Tensor) -> None: ...

    def _initial_state(self, param: torch.Tensor, kept: Mapping[str, torch.dtype]) -> tuple[State, dict]: ...


# ---- the parameters of a step ----


class _Sorted(NamedTuple):
    params: list[torch.Tensor]  # of the group when it was sorted
    direct: dict[torch.dtype | None, list[torch.Tensor]]  # master's dtype -> plain tensors
    indirect: list[torch.Tensor]  # sharded or quantized ones


def _sort(optimizer: Adam, group: dict[str, Any]) -> _Sorted:
    params, seen = group["params"], optimizer._sorted.get(id(group))
    if seen is not None and len(seen.params) == len(params) and all(map(is_, seen.params, params)):
        return seen
    direct, indirect = {}, []
    for p in params:
        if is_sharded(p) or isinstance(p, QuantizedTensor):
            indirect.append(p)
        else:
            state = optimizer.state.get(p)
            master = state[MASTER].dtype if state and MASTER in state else optimizer._kept(p).get(MASTER)
            direct.setdefault(master, []).append(p)
    optimizer._sorted[id(group)] = result = _Sorted(list(params), direct, indirect)
    return result


class _Entries:
    """Arguments of AdamLists.add that Python collects."""

    def __init__(self) -> None:
        self.params, self.grads, self.states, self.scales, self.fp8 = [], [], [], [], []

    def add(self, param: Any, grad: Any, state: Any, scales: Any, fp8: tuple | None = None) -> None:
        for each, value in zip(
            (self.params, self.grads, self.states, self.scales, self.fp8), (param, grad, state, scales, fp8)
        ):
            each.append(value)


class _Requantized(NamedTuple):
    """A quantized weight that takes the values of its master, or of the rounded master."""

    weight: QuantizedTensor
    values: torch.Tensor


class Step:
    """One step of all groups: __init__ checks, run() writes."""

    def __init__(self, optimizer: Adam, grad_scaler: Any) -> None:
        self.optimizer = optimizer
        self.new: dict[torch.Tensor, tuple[dict, dict]] = {}  # states of parameters that had none
        self.found_inf, self.inv_scale = _verdict(optimizer, grad_scaler)
        self.requantized: list[_Requantized] = []
        self.in_pass: list[Float8Tensor] = []
        self.rows: dict[int, StepOfRows] = {}  # of FP8 weights, by the address of their scale
        if not optimizer.capturable and stream_captures():
            raise ValueError(
                f"{OP}: a step with capturable=False is being captured, wanted capturable=True: replays would use the "
                "numbers of this step."
            )
        for index, group in enumerate(optimizer.param_groups):
            check_group(OP, group)
            if optimizer.capturable:
                put_on_device(optimizer.param_groups, index, optimizer._lrs)
        self.lists = [self._lists_of(group) for group in optimizer.param_groups]
        optimizer._guard.check(OP, [one for each in self.lists for one in each])

    # ---- checks ----

    def _lists_of(self, group: dict[str, Any]) -> list[_C.AdamLists]:
        found = _sort(self.optimizer, group)
        lists = [self._direct(master, params) for master, params in found.direct.items()]
        return lists + self._indirect(found.indirect)

    def _adam_lists(self, master: torch.dtype | None, rounding: torch.dtype = torch.float32) -> _C.AdamLists:
        o = self.optimizer
        return _C.AdamLists(OP, o.exp_avg_dtype, o.exp_avg_sq_dtype, master, rounding)

    def _direct(self, master: torch.dtype | None, params: list[torch.Tensor]) -> _C.AdamLists:
        o = self.optimizer
        grads = [getattr(p, "decoupled_grad", None) for p in params] if o.use_decoupled_grad else None
        states = list(map(o.state.get, params))
        scales = list(map(o._scales.get, params)) if o._scales else None
        lists = self._adam_lists(master)
        missing = lists.add(params, grads, states, scales, None)
        if not missing:
            return lists
        scales = scales or [None] * len(params)
        for i in missing:
            states[i], scales[i] = self._new(params[i])
        lists = self._adam_lists(master)
        lists.add(params, grads, states, scales, None)
        return lists

    def _new(self, param: torch.Tensor) -> tuple[dict, dict]:
        o = self.optimizer
        device = local_of(param).device
        if device.type == "cuda" and stream_captures():
            raise ValueError(
                f"{OP}: a parameter {list(param.shape)} has no state yet, and the step is being captured, wanted a "
                "step before the capture, or initialize_state(parameter): every replay would make it again."
            )
        if device.type == "meta":
            raise ValueError(
                f"{OP}: a parameter {list(param.shape)} is on meta, wanted one with memory; make the optimizer of the "
                "parameters after to_empty() and reset_parameters()."
            )
        self.new[param] = result = o._initial_state(param, o._kept(param))
        return result

    def _indirect(self, params: list[torch.Tensor]) -> list[_C.AdamLists]:
        o = self.optimizer
        kinds: dict[tuple, _Entries] = {}
        for p in params:
            grad = local_grad(getattr(p, "decoupled_grad", None) if o.use_decoupled_grad else p.grad, p)
            if grad is None:
                continue
            state, scales = o.state.get(p), o._scales.get(p)
            if not state:
                state, scales = self._new(p)
            state, weight = {name: local_of(t) for name, t in state.items()}, local_of(p)
            master = state[MASTER].dtype if MASTER in state else None
            if not isinstance(weight, QuantizedTensor):
                kinds.setdefault((master, torch.float32, False), _Entries()).add(weight, grad, state, scales)
                continue
            o._check_param(p)
            fp8 = self._in_pass(weight)
            if fp8 is not None:
                entries = kinds.setdefault((master, weight.dtype, True), _Entries())
                entries.add(weight._data, grad, state, scales, fp8)
            elif master is torch.float32:  # the weight itself
                kinds.setdefault((None, torch.float32, False), _Entries()).add(state[MASTER], grad, state, scales)
                self.requantized.append(_Requantized(weight, state[MASTER]))
            else:
                values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                kinds.setdefault((master, torch.float32, False), _Entries()).add(values, grad, state, scales)
                self.requantized.append(_Requantized(weight, values))
        result = []
        for (master, rounding, fp8), entries in kinds.items():
            result.append(self._adam_lists(master, rounding))
            result[-1].add(entries.params, entries.grads, entries.states, entries.scales, entries.fp8 if fp8 else None)
        return result

    def _in_pass(self, weight: QuantizedTensor) -> tuple | None:
        """(scale, amax, scale_inv, is E5M2) of a weight that the pass writes itself."""
        fp8 = _written_in_pass(weight)
        if fp8 is None or weight._rows_of is None:
            if fp8 is not None:
                self.in_pass.append(weight)
            return fp8
        scale, amax, scale_inv, e5m2 = fp8
        rows = self.rows.setdefault(scale_inv.data_ptr(), StepOfRows(weight))
        rows.parts.append(weight)
        return scale, amax, rows.scale_inv, e5m2

    # ---- writing ----

    def run(self) -> None:
        o = self.optimizer
        for param, (state, scales) in self.new.items():
            o.state[param] = state
            if scales:
                o._scales[param] = scales
        for group, lists in zip(o.param_groups, self.lists):
            self._run_group(group, lists)
        for weight in self.in_pass + [rows.complete(self._flag(rows.weight)) for rows in self.rows.values()]:
            _complete(weight)
        for some in _batches(self.requantized):
            flag = self._flag(some[0].weight)
            values = [one.values.to(one.weight.dtype) for one in some]
            quantize_all([one.weight for one in some], values, noop_flag=flag)

    def _flag(self, weight: QuantizedTensor) -> torch.Tensor | None:
        return None if self.found_inf is None else self.found_inf.to(weight.device, torch.float32).view(1)

    def _run_group(self, group: dict[str, Any], lists: list[_C.AdamLists]) -> None:
        o = self.optimizer
        lr, step, lr_tensor, step_tensor = group["lr"], group.get("step", 0), None, None
        noop, inv_scale = self.found_inf, self.inv_scale
        if o.capturable:
            noop, inv_scale = (None if t is None else t.to(step.device) for t in (noop, inv_scale))
            optimizer_count_step(step, noop)
            lr, step, lr_tensor, step_tensor = 0.0, 0, lr, step
        else:
            step = group["step"] = int(step) + 1
        beta1, beta2 = (float(beta) for beta in group["betas"])
        numbers = (float(lr), beta1, beta2, group["eps"], group["weight_decay"], step)
        modes = (o.adam_w_mode, bool(group["bias_correction"]))
        for each in lists:
            each.run(*numbers, *modes, noop, lr_tensor, step_tensor, inv_scale, None)


def _batches(requantized: list[_Requantized]) -> Iterator[list[_Requantized]]:
    """In their order, of one device each: rounded values of all at once would be as large as the model."""
    some: list[_Requantized] = []
    held = 0
    for one in requantized:
        size = one.values.numel() * one.weight.dtype.itemsize
        if some and (held + size > _ROUNDED_BYTES or one.weight.device != some[0].weight.device):
            yield some
            some, held = [], 0
        some.append(one)
        held += size
    if some:
        yield some


def _written_in_pass(weight: QuantizedTensor) -> tuple | None:
    """(scale, amax, scale_inv, is E5M2) of a weight whose scale is known before its values are."""
    quantizer = weight._quantizer
    if not (isinstance(weight, Float8Tensor) and isinstance(quantizer, Float8Quantizer)):
        return None
    if weight._data is None or quantizer._is_python():
        return None
    state = quantizer._weight_state(weight.device)
    if state is not None and not state.stepped:  # the values will bring their scale
        return None
    return quantizer.scale, quantizer.amax, weight._scale_inv, weight._fp8_dtype is DType.kFloat8E5M2


def _complete(weight: Float8Tensor) -> None:
    """Runs after its bytes have been written: derived data must follow."""
    usages = weight.get_usages()
    if usages[layout.COLUMNWISE]:
        transpose = engine.transpose(layout.matrix_of(layout.ROWWISE, weight._data))
        weight._transpose.copy_(transpose.view(weight._transpose.shape))
    else:
        weight._transpose_invalid = True
    weight._written()


def _verdict(optimizer: Adam, grad_scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(what skips the step, what the gradients are multiplied with), each one element on a device, or None."""
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if grad_scaler is not None and not grad_scaler.is_enabled():
        grad_scaler = None
    if found_inf is None and scale is None and grad_scaler is None:
        return None, None
    if not optimizer.capturable:
        raise ValueError(
            f"{OP}: 'grad_scaler', 'found_inf' or 'grad_scale' is given with capturable=False, wanted capturable=True, "
            "which needs parameters on CUDA; elsewhere call unscale_() and step() of GradScaler, which handle the "
            "gradients and leave a step out themselves."
        )
    if grad_scaler is not None:
        if optimizer.use_decoupled_grad:
            raise ValueError(
                f"{OP}: argument 'grad_scaler' is given with use_decoupled_grad=True, wanted attributes `found_inf` "
                "and `grad_scale`: GradScaler looks at .grad alone."
            )
        of_scaler, scale = _verdict_of(grad_scaler, optimizer)
        found_inf = of_scaler if found_inf is None else torch.maximum(found_inf.to(of_scaler).view(1), of_scaler)
    inv_scale = None if scale is None else scale.double().reciprocal().float().view(1)
    return None if found_inf is None else found_inf.view(1), inv_scale


def _verdict_of(grad_scaler: Any, optimizer: Adam) -> tuple[torch.Tensor, torch.Tensor | None]:
    about = grad_scaler._per_optimizer_states[id(optimizer)]
    unscaled = about["stage"] is not OptState.READY
    found = about["found_inf_per_device"] if unscaled else grad_scaler._check_inf_per_device(optimizer)
    scale = grad_scaler._get_scale_async()
    largest = torch.stack([each.to(scale.device).view(()) for each in found.values()]).amax().view(1)
    return largest, None if unscaled else scale
