"""What a module knows about quantization: the recipe that it runs under, its quantizers and scales, and the
part of a checkpoint that holds them. It quantizes nothing itself."""

from __future__ import annotations

import functools
import io
import warnings
import weakref
from collections import deque

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.compiling import refuse
from transformer_engine.pytorch.quantization import extra_state
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState
from transformer_engine.pytorch.quantization.module_plan import AGAIN, QUIET, RECORD, ModuleQuantization
from transformer_engine.pytorch.quantization.module_weights import QuantizedWeights
from transformer_engine.pytorch.quantization.products import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    SLOTS,
    Plan,
    traced_integers,
)
from transformer_engine.pytorch.quantization.roles import QuantizerRole
from transformer_engine.pytorch.quantization.surroundings import STATE, State, get_default_recipe
from transformer_engine.pytorch.recompute_phase import RecomputePhase, recompute_phase
from transformer_engine.pytorch.tensor import QuantizedTensor

# Made anew where it is needed: objects of the extension, and what belongs to a moment.
_MADE_ANEW = {"_own": None, "_token": None, "_seen_region": None, "_unfollowed": None}


def _under_compile() -> bool:
    """Also where a graph breaks: what has raised while it was traced runs uncompiled, but a call from there is traced
    anew. Hence a function of its own."""
    return torch.compiler.is_compiling()


class QuantizationState(QuantizedWeights):
    """A subclass names its products in `_products`; `_quantization(product)` in forward says how one is quantized.

    fp8, fp8_calibration: whether the last forward ran so. fp8_meta: recipe, fp8_group, num_gemms, and under delayed
    scaling scaling_fwd and scaling_bwd with scale, scale_inv and amax_history; columns are input, weight and output of
    each product, and grad_output and grad_input.
    """

    _products: tuple[str, ...] = ()
    _role_kind = "linear"  # what a factory is told that the module is
    # What a factory is asked for outputs and gradients of inputs; None: the module's own roles.
    output_quantizer_role: QuantizerRole | None = None
    grad_input_quantizer_role: QuantizerRole | None = None

    def _init_quantization(self) -> None:
        # quantized_model_init around the construction; the parameters themselves may come later (device="meta")
        self.primary_weights_in_fp8 = STATE.parameters and bool(self._products)
        self.preserve_high_precision_init_val = self.primary_weights_in_fp8 and STATE.preserve_high_precision
        self._parameters_recipe = STATE.parameters_recipe
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, object] = {
            "fp8_checkpoint": False,
            "recipe": get_default_recipe(),
            "fp8_group": None,
            "num_gemms": len(self._products),
        }
        self._cached_weights: dict[str, tuple] = {}
        self.__dict__.update(_MADE_ANEW)

    # ---- how a product is quantized ----

    def _quantization(self, product: str = "") -> object | list[int] | None:
        """_C.ProductQuantization of this call's product, its integers under torch.compile; None: high precision."""
        state = STATE
        if torch.compiler.is_compiling():
            return self._traced_quantization(state)
        if not state.active:
            if self._token is not None:
                self._leave()
            return None
        if self._token is not state.token or state.token is None:
            self._enter(state)
        if not state.enabled:
            return None
        own = self._own
        if own.shared is not None:
            return own.shared
        index = self._products.index(product)
        return own.product(index, RECORD if own.rule is None else self._variant(state, own, index))

    def _traced_quantization(self, state: State) -> list[int] | None:
        if state.enabled:
            return traced_integers(state.chosen_recipe())
        if state.calibrating:
            refuse(
                f"{type(self).__name__}: calibrating is not available in this version under torch.compile; calibrate "
                "the module uncompiled."
            )
        return None

    def _quantized_product(
        self, product: str, weight: torch.Tensor, is_first_microbatch: bool | None
    ) -> tuple[object | None, _C.Quantized | None]:
        """(_quantization, _quantized_weight) of a call."""
        if self.primary_weights_in_fp8 and STATE.enabled and _under_compile():
            refuse(
                f"{type(self).__name__}: a product with a quantized weight (quantized_model_init) is not available in "
                "this version under torch.compile; keep the module out of the compiled region."
            )
        quantization = self._quantization(product)
        if quantization is None:
            return None, None
        return quantization, self._quantized_weight(product, weight, is_first_microbatch)

    def _quantized_output(self, output: torch.Tensor) -> QuantizedTensor:
        """By the output's quantizer, differentiable."""
        if torch.compiler.is_compiling():
            refuse(
                f"{type(self).__name__}: argument 'fp8_output' is True, but an output that is a quantized tensor is "
                "not available in this version under torch.compile; leave it at False."
            )
        own = self._own
        quantizer = own.output_quantizer(RECORD if own.rule is None else self._kind_of_call(recompute_phase()))
        if quantizer is None:
            return output
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer(output)

    def _leave(self) -> None:
        self._token = None
        self.fp8 = self.fp8_calibration = False

    def _enter(self, state: State) -> None:
        """The first call inside an autocast. Errors leave the module as it was."""
        plan = state.chosen_plan()
        if state.token is None and (plan.rule is not None or plan.factory is not None):
            raise NotImplementedError(
                f"{type(self).__name__}: te.autocast was entered by code that torch.compile has compiled, in which "
                f"{type(plan.recipe).__name__} is not available in this version; use Float8CurrentScaling or "
                "Float8BlockScaling, or enter it outside of the compiled function."
            )
        own = self._own
        if own is None or own.plan is not plan or (own.rule is not None and own.device != self._weight_device()):
            own = self._adopt(state, plan)
        self.fp8_meta.update(
            fp8_checkpoint=True, recipe=state.chosen_recipe(), fp8_group=state.group, num_gemms=len(self._products)
        )
        seen = self.__dict__  # past Module.__setattr__, which takes microseconds
        seen["_seen_region"] = None if state.region is None else weakref.ref(state.region)
        seen["fp8"], seen["fp8_calibration"], seen["_token"] = state.enabled, state.calibrating, state.token

    def _weight_device(self) -> torch.device:
        return getattr(self, self._product_names(self._products[0])[0][0]).device

    def _adopt(self, state: State, plan: Plan) -> ModuleQuantization:
        old = self._own
        meta = self.fp8_meta
        seen = self._seen_region and self._seen_region()
        if old is not None and old.plan is not plan and recompute_phase().recomputing and (old.rule or plan.rule):
            raise RuntimeError(
                f"{type(self).__name__}: its forward is recomputed under {type(plan.recipe).__name__}, but since then "
                f"it has run under {type(old.plan.recipe).__name__}, and its scales are gone; run backward before the "
                "recipe changes."
            )
        own = ModuleQuantization(plan, self._roles(), self._weight_device())
        changed = old is not None and old.plan is not plan
        if changed and seen is not None and seen is state.region and (old.rule or own.rule):
            raise RuntimeError(
                f"{type(self).__name__}: it has run under {type(old.plan.recipe).__name__}, and is called under "
                f"another recipe, {type(plan.recipe).__name__}, within the same outermost autocast; with delayed "
                "scaling a module keeps one recipe there. Let the outermost autocast end between the two calls."
            )
        primary = self._primary_weights()
        for index, _, weight in primary:
            self._check_primary_weight(own, index, weight)
        own.prepare(meta.get("scaling_fwd"), meta.get("scaling_bwd"))
        self._hold(own)
        self._tell_of_switch(type(meta["recipe"]), type(state.chosen_recipe()))
        for index, _, weight in primary:
            self._adopt_primary_weight(own, index, weight)
        return own

    def _tell_of_switch(self, before: type, now: type) -> None:
        if before is not now and self.fp8_meta["fp8_checkpoint"] and not recompute_phase().recomputing:
            warnings.warn(
                f"{type(self).__name__}: the recipe is a {now.__name__}, and was a {before.__name__} when the module "
                "ran last; its quantizers are made anew.",
                stacklevel=2,
            )

    def _hold(self, own: ModuleQuantization) -> None:
        self._own = own
        self._cached_weights = {}
        for key, scaling in (("scaling_fwd", own.forward), ("scaling_bwd", own.backward)):
            if scaling is None:
                self.fp8_meta.pop(key, None)
            else:
                self.fp8_meta[key] = scaling
                scaling.gathered = self._gathered_columns(scaling.forward)

    def _gathered_columns(self, forward: bool) -> tuple[str, list[int]] | None:
        """As ScalingState.gathered has them."""
        return None

    def _roles(self) -> list[dict[str, QuantizerRole]]:
        own = {"output": self.output_quantizer_role, "grad_input": self.grad_input_quantizer_role}
        roles = []
        for product in self._products:
            name = ".".join(part for part in (self.name or "", product) if part)
            roles.append({role: own.get(role) or QuantizerRole(self._role_kind, role, name) for role in SLOTS})
        return roles

    def _kind_of_call(self, phase: RecomputePhase) -> int:
        """Under delayed scaling."""
        if phase.recomputing:
            return AGAIN
        return RECORD if self.training and (phase.enabled or torch.is_grad_enabled()) else QUIET

    def _variant(self, state: State, own: ModuleQuantization, index: int) -> int:
        """Of a call under delayed scaling; the module's first product decides for this call what is kept."""
        phase = recompute_phase()
        kind = self._kind_of_call(phase)
        if kind == AGAIN:
            if index == 0:
                scales, watched = self._take(phase)
                own.use_again(scales)
                self._unfollowed = None
                if watched is not None:
                    watch, place = watched
                    if not watch.reached(place):  # recomputed ahead of its backward
                        self._unfollowed = functools.partial(watch.follow, place=place)
            return kind
        if index == 0 and kind == RECORD:
            if state.noted is not None:
                state.noted.setdefault(self, (state.token, state.group))
            region = None if state.capturing else state.region
            if region is not None:
                self._register(region, own, state.group)
                self._unfollowed = None if region.claimed else region.follow
            if phase.enabled:
                self._leave_for_recompute(state, phase, own)
        return kind

    @staticmethod
    def _register(region: Region, own: ModuleQuantization, group: object | None) -> None:
        if not region.has(own.forward):
            region.add(own.forward, group, forward=True)
            region.add(own.backward, group, forward=False)

    def _leave_for_recompute(self, state: State, phase: RecomputePhase, own: ModuleQuantization) -> None:
        watched = None
        if self._unfollowed is not None and not torch.is_grad_enabled():  # its output will have a graph then alone
            self._unfollowed = None
            watch = state.region.watch()
            watched = watch, watch.take()
        # In a capture a copy that was made outside of it would be the same at each replay.
        scales = own.forward.scale.clone() if state.capturing else own.forward.used()
        phase.leave(self, (scales, watched))

    def left_in_order(self) -> deque:
        """What first runs have left whose phases were said by hand."""
        return self.fp8_meta.setdefault("scales_for_recompute", deque())

    def _take(self, phase: RecomputePhase) -> tuple[torch.Tensor, tuple[_C.BackwardWatch, int] | None]:
        entry = phase.take(self)
        if entry is None:
            raise RuntimeError(
                f"{type(self).__name__}: a recomputed forward needs the scales of its first run, but that run left "
                "none; run it in training mode inside activation_recompute_forward(activation_recompute=True), or use "
                "te.checkpoint."
            )
        return entry

    def _follow(self, output: torch.Tensor) -> None:
        """Called with the output of a call that was quantized: scales change when the backward through it has ended."""
        follow = self._unfollowed
        if follow is not None:
            self._unfollowed = None
            if output.requires_grad:
                follow(output)

    def _calibrate(self, product: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Notes the amaxes of a product that is computed in high precision."""
        own = self._own
        if own is None or own.rule is None:
            return
        index = self._products.index(product)
        own.note(index, "input", _C.quantize_amax(x.detach()))
        own.note(index, "weight", _C.quantize_amax(weight.detach()))
        if index == 0 and STATE.region is not None:
            STATE.region.add(own.forward, STATE.group, forward=True)

    def train(self, mode: bool = True) -> QuantizationState:
        """As torch's. Outside of training no history follows the weights: what they take brings its scale."""
        if not mode and (forward := self.fp8_meta.get("scaling_fwd")) is not None:
            forward.stepped = False
        return super().train(mode)

    # ---- what clients look at and call ----

    @property
    def quantizers(self) -> dict[str, list]:
        """scaling_fwd: of input, weight and output of each product; scaling_bwd: of grad_output and grad_input. Empty
        until the module has run inside autocast."""
        return {} if self._own is None else self._own.python_quantizers()

    def init_fp8_metadata(self, num_gemms: int | None = None) -> None:
        """Makes scales and histories for the recipe of the autocast around the call; a forward does the same.
        num_gemms: how many products the module has. Errors: ValueError for another number."""
        if num_gemms not in (None, len(self._products)):
            raise ValueError(
                f"{type(self).__name__}: argument 'num_gemms' is {num_gemms}, wanted {len(self._products)}, the "
                "module's products."
            )
        if STATE.active and self._products and self._token is not STATE.token:
            self._enter(STATE)

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Makes the histories (of one direction: fwd) shorter or longer; the newest amaxes stay. Errors: ValueError for
        a length below 1."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"{type(self).__name__}: argument 'length' is {length!r}, wanted a whole number, at least 1."
            )
        for key, forward in (("scaling_fwd", True), ("scaling_bwd", False)):
            if key in self.fp8_meta and fwd in (None, forward):
                self.fp8_meta[key].resize(length)
        if self._own is not None:
            self._own.drop_views()

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the module's parameters."""
        return any(hasattr(parameter, "device_mesh") for parameter in self.parameters(recurse=False))

    # ---- checkpoints and copies ----

    def get_extra_state(self) -> torch.Tensor:
        """uint8: scales and histories of delayed scaling, empty where there are none. Inside an autocast of delayed
        scaling there are, those of a module that has not run yet too: loaders that read into the tensors of a state
        dict (torch.distributed.checkpoint) find room for a checkpoint's."""
        ran = self._own is not None or self.fp8_meta["fp8_checkpoint"] or "scaling_fwd" in self.fp8_meta
        if not (ran or self.primary_weights_in_fp8) and STATE.active and STATE.chosen_recipe().delayed():
            self.init_fp8_metadata()
        forward, backward = self.fp8_meta.get("scaling_fwd"), self.fp8_meta.get("scaling_bwd")
        return torch.empty(0, dtype=torch.uint8) if forward is None else extra_state.pack(forward, backward)

    def set_extra_state(self, state: torch.Tensor | io.BytesIO | None) -> None:
        """Takes what get_extra_state wrote, or Transformer Engine's; nothing changes where the checkpoint has no state,
        or, with a UserWarning, one of Transformer Engine's for other tensors than this module has."""
        loaded = self.check_extra_state(state)
        if isinstance(loaded, extra_state.Foreign):
            warnings.warn(
                f"{type(self).__name__}: the checkpoint's '_extra_state' {loaded}; scales start anew.", stacklevel=2
            )
            return
        if loaded is None:
            return
        for key, found in zip(("scaling_fwd", "scaling_bwd"), loaded, strict=True):
            own, forward = self.fp8_meta.get(key), key == "scaling_fwd"
            if own is None:
                columns, device = found.scale.numel(), self._weight_device()
                device = torch.device("cpu") if device.type == "meta" else device
                own = self.fp8_meta[key] = ScalingState(found.rule, columns, device, forward=forward)
            else:
                own.resize(own.rule.amax_history_len)
            own.take(found.rule, found.scale, found.amax_history)
        if self._own is not None:
            self._own.drop_views()
        self._cached_weights = {}

    def check_extra_state(self, state: torch.Tensor | io.BytesIO | None) -> tuple | extra_state.Foreign | None:
        """What is in it. Raises ValueError for state that set_extra_state cannot take."""
        columns = FORWARD_SLOTS * len(self._products), BACKWARD_SLOTS * len(self._products)
        try:
            return extra_state.unpack(extra_state.bytes_of(state), columns)
        except extra_state.Foreign as foreign:
            return foreign
        except extra_state.Unfit as error:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's '_extra_state' {error}; drop that key to load the rest, and "
                "scales start anew."
            ) from None

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, **_MADE_ANEW, "_cached_weights": {}, "fp8": False, "fp8_calibration": False}
        state["_wgrad_products"] = {}
        if "_exchanges" in state:
            state["_exchanges"] = {}
        state["fp8_meta"] = {**self.fp8_meta, "fp8_group": None}
        state["fp8_meta"].pop("scales_for_recompute", None)
        return state
