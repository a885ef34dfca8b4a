"""A module's state of quantization between its calls: the last autocast, its plan, scales and kept weights; and how a
call's product is quantized. A module's `runtime` owns one. It quantizes no activation itself."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes, refuse
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import current_graph_task_id
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState
from transformer_engine.pytorch.quantization.module.delayed import DelayedCalls, kind_of_call
from transformer_engine.pytorch.quantization.module.plan import RECORD, ModulePlan
from transformer_engine.pytorch.quantization.module.primary_weights import (
    adopt_primary_weight,
    check_primary_weight,
    drop_columns,
    keep_high_precision,
    primary_weights,
)
from transformer_engine.pytorch.quantization.module.weights import KeptWeights, WeightCalls
from transformer_engine.pytorch.quantization.recipes.products import SLOTS, Plan, plan_of, traced_integers
from transformer_engine.pytorch.quantization.roles import QuantizerRole
from transformer_engine.pytorch.quantization.state.autocast_state import (
    THREAD,
    AutocastState,
    current_state,
    get_default_recipe,
)
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer

DIRECTIONS = ("scaling_fwd", "scaling_bwd")  # keys of meta


def _under_compile() -> bool:
    """A function of its own, because a graph may break here: after an error during tracing the caller runs uncompiled,
    but a call from there is traced again."""
    return torch.compiler.is_compiling()


def _first_weight(module: torch.nn.Module) -> torch.Tensor:
    return getattr(module, module._product_names(module._products[0])[0][0])


def _weight_device(module: torch.nn.Module) -> torch.device:
    return _first_weight(module).device


def _is_real(weight: torch.Tensor) -> bool:
    """False for a weight that a tracer made: everything that belongs to it must be the tracer's too."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter) or isinstance(weight, QuantizedTensor)


def roles_of(module: torch.nn.Module) -> list[dict[str, QuantizerRole]]:
    """Of each product: role -> the question to a factory."""
    own = {"output": module.output_quantizer_role, "grad_input": module.grad_input_quantizer_role}
    roles = []
    for product in module._products:
        name = ".".join(part for part in (module.name or "", product) if part)
        roles.append({role: own.get(role) or QuantizerRole(module._role_kind, role, name) for role in SLOTS})
    return roles


class _Noted:
    """A copy of a scaling state: its recipe, its tensors and, if `values` is set, their values."""

    def __init__(self, state: ScalingState, values: bool) -> None:
        self.state, self.fields = state, dict(vars(state))
        self.values = [(t, t.clone()) for t in (state.scale, state.amax_history)] if values else []

    def put_back(self) -> None:
        vars(self.state).update(self.fields)
        for t, value in self.values:
            t.copy_(value)
        self.state.changed()


@dataclass(frozen=True)
class Snapshot:
    """The argument of restore()."""

    remembered: dict[str, object]
    meta: dict[str, object]
    kept: dict[str, tuple]
    scales: list[_Noted]
    quantizers: list[tuple[QuantizedTensor, Quantizer | None]]


class ModuleQuantization(DelayedCalls, WeightCalls):
    """Methods take the module as an argument; no reference to it is held. `_products` and `_product_names()` describe
    its computation.

    fp8, fp8_calibration: whether the last forward ran so. meta: the fp8_meta of clients. own: the recipe's plan in this
    module, None until it has run. token, seen_region: the last autocast, and its region. unfollowed: called with the
    call's output. parameters_recipe: of quantized_model_init.
    """

    def __init__(self, products: int) -> None:
        self.parameters_recipe: Recipe | None = current_state().parameters_recipe
        self.meta: dict[str, object] = {
            "fp8_checkpoint": False,
            "recipe": get_default_recipe(),
            "fp8_group": None,
            "num_gemms": products,
        }
        self.weights = KeptWeights()
        self.forget()

    # ---- between calls ----

    def forget(self) -> None:
        """As if it had not run, except for the recipe and the scales: the rest is made again on demand."""
        self.own: ModulePlan | None = None
        self.token: object | None = None
        self.seen_region: weakref.ref[Region] | None = None
        self.unfollowed = None
        self.fp8 = self.fp8_calibration = False
        self.weights.forget()

    @torch.no_grad()
    def snapshot(self, module: torch.nn.Module, values: bool) -> Snapshot:
        remembered = {k: v for k, v in vars(self).items() if k not in ("meta", "weights", "parameters_recipe")}
        meta = {k: v.copy() if isinstance(v, deque) else v for k, v in self.meta.items()}  # scales for a recomputation
        quantized = [p for p in module.parameters(recurse=False) if isinstance(p, QuantizedTensor)]
        return Snapshot(
            remembered,
            meta,
            dict(self.weights.kept),
            [_Noted(state, values) for state in self.scaling_states()],
            [(p, p._quantizer) for p in quantized],
        )

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        vars(self).update(snapshot.remembered)
        self.meta.clear()
        self.meta.update(snapshot.meta)
        self.weights.kept = snapshot.kept
        for scales in snapshot.scales:
            scales.put_back()
        for parameter, quantizer in snapshot.quantizers:
            parameter._quantizer = quantizer

    def shared(self) -> ModuleQuantization:
        """Another one with the same scales and kept weights, which continues independently."""
        twin = ModuleQuantization.__new__(ModuleQuantization)
        twin.__dict__.update(vars(self))
        twin.weights = self.weights.shared()
        return twin

    def scaling_states(self) -> list[ScalingState]:
        return [self.meta[key] for key in DIRECTIONS if self.meta.get(key) is not None]

    def enter_anew(self) -> None:
        """The next call treats the autocast in force as a new one."""
        self.token = None

    def leave(self) -> None:
        self.token = None
        self.fp8 = self.fp8_calibration = False

    # ---- the quantization of a call's product ----

    def of_call(
        self, module: torch.nn.Module, product: str, weight: torch.Tensor, is_first_microbatch: bool | None
    ) -> tuple[object | None, _C.Quantized | None]:
        """(of_product, of_weight) of a call."""
        if module.primary_weights_in_fp8 and current_state().enabled and _under_compile():
            refuse(
                f"{type(module).__name__}: a product with a quantized weight (quantized_model_init) is not available "
                "in this version under torch.compile; keep the module out of the compiled region."
            )
        quantization = self.of_product(module, product)
        if quantization is None:
            return None, None
        return quantization, self.of_weight(module, product, weight, is_first_microbatch)

    def of_product(self, module: torch.nn.Module, product: str = "") -> object | list[int] | None:
        """_C.ProductQuantization of this call's product, or its integers under torch.compile; None: high precision."""
        state = THREAD.state
        if torch.compiler.is_compiling():
            return self._traced(module, state)
        if state.borrowed or (not state.active and current_graph_task_id() != -1):
            state = current_state()
        if not state.active:
            if self.token is not None:
                self._warn_of_recomputation(module)
                self.leave()
            return None
        if self.token is not state.token or state.token is None:
            self.enter(module, state)
        if not state.enabled:
            return None
        own = self.own
        if own.shared is not None:
            return own.shared
        index = module._products.index(product)
        return own.product(index, RECORD if own.rule is None else self.variant(module, state, own, index))

    def _warn_of_recomputation(self, module: torch.nn.Module) -> None:
        """Warns of a second run in a backward outside of the autocast of the first run."""
        if self.fp8 and torch.is_grad_enabled() and current_graph_task_id() != -1:
            warnings.warn(
                f"{type(module).__name__}: it ran under te.autocast, and runs without it inside a backward, as "
                "torch.utils.checkpoint recomputes: its gradients are not those of the forward that ran; use "
                "te.checkpoint, which recomputes under the same autocast.",
                stacklevel=2,
            )

    def of_products(self, module: torch.nn.Module) -> list[object]:
        """of_product() of each product, in eager mode: one entry if it serves all, none in high precision."""
        first = self.of_product(module, module._products[0])
        if first is None:
            return []
        own = self.own
        if own.shared is not None:
            return [first]
        kind = RECORD if own.rule is None else kind_of_call(module, recompute_phase())
        return [first, *own.products(kind)[1:]]

    @staticmethod
    def _traced(module: torch.nn.Module, state: AutocastState) -> list[int] | None:
        if state.enabled:
            return traced_integers(state.chosen_recipe())
        if state.calibrating:
            refuse(
                f"{type(module).__name__}: calibrating is not available in this version under torch.compile; calibrate "
                "the module uncompiled."
            )
        return None

    def of_output(self, module: torch.nn.Module, output: torch.Tensor) -> QuantizedTensor:
        """Quantizes by the output's quantizer, differentiable."""
        if torch.compiler.is_compiling():
            refuse(
                f"{type(module).__name__}: argument 'fp8_output' is True, but an output that is a quantized tensor is "
                "not available in this version under torch.compile; leave it at False."
            )
        own = self.own
        quantizer = own.output_quantizer(RECORD if own.rule is None else kind_of_call(module, recompute_phase()))
        if quantizer is None:
            return output
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer(output)

    def calibrate(self, index: int, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Records the amaxes of a product that is computed in high precision."""
        own = self.own
        if own is None or own.rule is None:
            return
        own.note(index, "input", _C.quantize_amax(x.detach()))
        own.note(index, "weight", _C.quantize_amax(weight.detach()))
        state = current_state()
        if index == 0 and state.region is not None:
            state.region.add(own.forward, state.group, forward=True)

    # ---- the recipe ----

    def enter(self, module: torch.nn.Module, state: AutocastState) -> None:
        """The first call inside an autocast. Errors leave the module unchanged."""
        plan = state.chosen_plan()
        if state.token is None and (plan.rule is not None or plan.factory is not None):
            raise NotImplementedError(
                f"{type(module).__name__}: te.autocast was entered by code that torch.compile has compiled, in which "
                f"{type(plan.recipe).__name__} is not available in this version; use Float8CurrentScaling or "
                "Float8BlockScaling, or enter it outside of the compiled function."
            )
        own = self.own
        if own is None or own.plan is not plan or (own.rule is not None and own.device != _weight_device(module)):
            with outside_of_modes() if _is_real(_first_weight(module)) else nullcontext():
                self._adopt(module, state, plan)
        self.meta.update(
            fp8_checkpoint=True, recipe=state.chosen_recipe(), fp8_group=state.group, num_gemms=len(module._products)
        )
        self.seen_region = None if state.region is None else weakref.ref(state.region)
        self.fp8, self.fp8_calibration, self.token = state.enabled, state.calibrating, state.token

    def _adopt(self, module: torch.nn.Module, state: AutocastState, plan: Plan) -> None:
        op, old = type(module).__name__, self.own
        seen = self.seen_region and self.seen_region()
        if old is not None and old.plan is not plan and recompute_phase().recomputing and (old.rule or plan.rule):
            raise RuntimeError(
                f"{op}: its forward is recomputed under {type(plan.recipe).__name__}, but since then "
                f"it has run under {type(old.plan.recipe).__name__}, and its scales are gone; run backward before the "
                "recipe changes."
            )
        own = ModulePlan(plan, roles_of(module), _weight_device(module))
        changed = old is not None and old.plan is not plan
        if changed and seen is not None and seen is state.region and (old.rule or own.rule):
            raise RuntimeError(
                f"{op}: it has run under {type(old.plan.recipe).__name__}, and is called under "
                f"another recipe, {type(plan.recipe).__name__}, within the same outermost autocast; with delayed "
                "scaling a module keeps one recipe there. Let the outermost autocast end between the two calls."
            )
        primary = primary_weights(module)
        for index, _, weight in primary:
            check_primary_weight(op, own, index, weight, self.parameters_recipe)
        own.prepare(*(self.meta.get(key) for key in DIRECTIONS))
        self._hold(module, own)
        self._warn_of_switch(op, type(self.meta["recipe"]), type(state.chosen_recipe()))
        for index, _, weight in primary:
            adopt_primary_weight(own, index, weight)

    def _warn_of_switch(self, op: str, before: type, now: type) -> None:
        if before is not now and self.meta["fp8_checkpoint"] and not recompute_phase().recomputing:
            warnings.warn(
                f"{op}: the recipe is a {now.__name__}, and was a {before.__name__} when the module "
                "ran last; its quantizers are made again.",
                stacklevel=2,
            )

    def _hold(self, module: torch.nn.Module, own: ModulePlan) -> None:
        self.forget()
        self.own = own
        for key, scaling in zip(DIRECTIONS, (own.forward, own.backward), strict=True):
            if scaling is None:
                self.meta.pop(key, None)
            else:
                self.meta[key] = scaling
        self.agree_over_group(module)

    def agree_over_group(self, module: torch.nn.Module) -> None:
        """The ranks of a group share the scales of tensors that are gathered over it."""
        for scaling in self.scaling_states():
            scaling.gathered = module._gathered_columns(scaling.forward)

    # ---- parameters and checkpoints ----

    def quantize_parameters(self, module: torch.nn.Module) -> None:
        """Under quantized_model_init the products' weights, just initialised, become quantized tensors; in a module
        that is built without gradients, for inference, they have no columnwise data until training needs them."""
        if not module.primary_weights_in_fp8:
            return
        for_training = torch.is_grad_enabled()
        names = [module._product_names(product)[0] for product in module._products]
        if any(len(weights) > 1 for weights in names):
            raise NotImplementedError(
                f"{type(module).__name__}: quantized_model_init with the weight in several parameters {names}, which "
                "are scaled as one, is not available in this version; build the module without parameters_split "
                "(fuse_qkv_params=True in attention)."
            )
        own = self.own
        if own is None:
            if self.parameters_recipe is None:
                self.parameters_recipe = current_state().chosen_recipe()
            own = ModulePlan(plan_of(self.parameters_recipe), roles_of(module), _weight_device(module))
            own.prepare(None, None)
            self._hold(module, own)
        for index, (name,) in enumerate(names):
            weight = getattr(module, name)
            if isinstance(weight, QuantizedTensor):
                continue
            quantizer = own.python_quantizer(index, "weight", held=True)
            if quantizer is None:
                continue
            with torch.no_grad():
                quantized = torch.nn.Parameter(quantizer._held(weight), weight.requires_grad)
            if not for_training:
                drop_columns(quantized)
            if module.preserve_high_precision_init_val:
                keep_high_precision(quantized, weight)
            setattr(module, name, quantized)
            module._tag(name)

    def parameters_loaded(self, module: torch.nn.Module) -> None:
        """The module's parameters have new values, or have been replaced."""
        self.weights.forget()
        own = self.own
        for index, _, weight in primary_weights(module):  # with assign=True they may come from another module
            if own is None or own.weight_format(index) is None:
                column = getattr(weight._quantizer, "_column", None)
                if column is not None and column.state is not self.meta.get("scaling_fwd"):
                    weight._quantizer = None
            elif own.weight_format(index)._makes_the_same(weight._quantizer, weight):
                adopt_primary_weight(own, index, weight)

    def scales_moved(self) -> None:
        """The histories are other tensors, or have other values."""
        if self.own is not None:
            self.own.drop_views()

    def scaling_state_like(self, module: torch.nn.Module, key: str, found: object) -> ScalingState:
        """The state of meta[key], ready to load the values of a checkpoint."""
        own = self.meta.get(key)
        if own is None:
            columns, device = found.scale.numel(), _weight_device(module)
            device = torch.device("cpu") if device.type == "meta" else device
            own = self.meta[key] = ScalingState(found.rule, columns, device, forward=key == "scaling_fwd")
        else:
            own.resize(own.rule.amax_history_len)
        return own
