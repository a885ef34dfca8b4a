"""The attributes of a module's quantization for clients: scales, histories, and `_extra_state`, whose bytes
checkpoint/extra_state.py writes. quantization.py does the work."""

from __future__ import annotations

import io
import warnings

import torch

from transformer_engine.pytorch.quantization.checkpoint import extra_state
from transformer_engine.pytorch.quantization.module.quantization import DIRECTIONS
from transformer_engine.pytorch.quantization.recipes.products import BACKWARD_SLOTS, FORWARD_SLOTS
from transformer_engine.pytorch.quantization.roles import QuantizerRole
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class QuantizedModule(torch.nn.Module):
    """A subclass names its products in `_products`; in forward its `runtime.quantization` quantizes them.

    fp8, fp8_calibration: whether the last forward ran so. fp8_meta: recipe, fp8_group, num_gemms, and under delayed
    scaling scaling_fwd and scaling_bwd with scale, scale_inv and amax_history; columns are input, weight and output of
    each product, and grad_output and grad_input.
    """

    _products: tuple[str, ...] = ()
    _role_kind = "linear"  # the module_type in questions to a factory
    # The roles of outputs and gradients of inputs in questions to a factory; None: the module's own roles.
    output_quantizer_role: QuantizerRole | None = None
    grad_input_quantizer_role: QuantizerRole | None = None

    def _gathered_columns(self, forward: bool) -> tuple[str, list[int]] | None:
        """The value of ScalingState.gathered."""
        return None

    @property
    def fp8(self) -> bool:
        return self.runtime.quantization.fp8

    @fp8.setter
    def fp8(self, value: bool) -> None:
        self.runtime.quantization.fp8 = value

    @property
    def fp8_calibration(self) -> bool:
        return self.runtime.quantization.fp8_calibration

    @fp8_calibration.setter
    def fp8_calibration(self, value: bool) -> None:
        self.runtime.quantization.fp8_calibration = value

    @property
    def fp8_meta(self) -> dict[str, object]:
        return self.runtime.quantization.meta

    @fp8_meta.setter
    def fp8_meta(self, value: dict[str, object]) -> None:
        self.runtime.quantization.meta = value

    @property
    def quantizers(self) -> dict[str, list]:
        """scaling_fwd: of input, weight and output of each product; scaling_bwd: of grad_output and grad_input. Empty
        until the module has run inside autocast."""
        own = self.runtime.quantization.own
        return {} if own is None else own.python_quantizers()

    def init_fp8_metadata(self, num_gemms: int | None = None) -> None:
        """Makes scales and histories for the recipe of the autocast in force; a forward does the same. num_gemms: the
        number of the module's products. Errors: ValueError for another number."""
        if num_gemms not in (None, len(self._products)):
            raise ValueError(
                f"{type(self).__name__}: argument 'num_gemms' is {num_gemms}, wanted {len(self._products)}, the "
                "module's products."
            )
        quantization = self.runtime.quantization
        state = current_state()
        if state.active and self._products and quantization.token is not state.token:
            quantization.enter(self, state)

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Makes the histories (of one direction: fwd) shorter or longer; the newest amaxes stay. Errors: ValueError for
        a length below 1."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"{type(self).__name__}: argument 'length' is {length!r}, wanted a whole number, at least 1."
            )
        for key, forward in zip(DIRECTIONS, (True, False), strict=True):
            if key in self.fp8_meta and fwd in (None, forward):
                self.fp8_meta[key].resize(length)
        self.runtime.quantization.scales_moved()

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the module's parameters."""
        return any(hasattr(parameter, "device_mesh") for parameter in self.parameters(recurse=False))

    def train(self, mode: bool = True) -> QuantizedModule:
        """As torch's. Outside of training no history follows the weights: new values bring their own scale."""
        if not mode and (forward := self.fp8_meta.get("scaling_fwd")) is not None:
            forward.stepped = False
        return super().train(mode)

    # ---- checkpoints ----

    def get_extra_state(self) -> torch.Tensor:
        """uint8: scales and histories of delayed scaling, empty if there are none. Inside an autocast of delayed
        scaling a module that has not run has them too: loaders that read into the tensors of a state dict
        (torch.distributed.checkpoint) find memory for a checkpoint's."""
        meta = self.fp8_meta
        ran = self.runtime.quantization.own is not None or meta["fp8_checkpoint"] or "scaling_fwd" in meta
        state = current_state()
        if not (ran or self.primary_weights_in_fp8) and state.active and state.chosen_recipe().delayed():
            self.init_fp8_metadata()
        forward, backward = (meta.get(key) for key in DIRECTIONS)
        return torch.empty(0, dtype=torch.uint8) if forward is None else extra_state.pack(forward, backward)

    def set_extra_state(self, state: torch.Tensor | io.BytesIO | None) -> None:
        """Loads the state of get_extra_state, or of Transformer Engine; nothing changes if the checkpoint has no state,
        or, with a UserWarning, if it has Transformer Engine's state for other tensors than this module has."""
        loaded = self.check_extra_state(state)
        if isinstance(loaded, extra_state.Foreign):
            warnings.warn(
                f"{type(self).__name__}: the checkpoint's '_extra_state' {loaded}; scales start again.", stacklevel=2
            )
            return
        if loaded is None:
            return
        quantization = self.runtime.quantization
        for key, found in zip(DIRECTIONS, loaded, strict=True):
            quantization.scaling_state_like(self, key, found).take(found.rule, found.scale, found.amax_history)
        quantization.scales_moved()
        quantization.weights.forget()

    def check_extra_state(self, state: torch.Tensor | io.BytesIO | None) -> tuple | extra_state.Foreign | None:
        """The contents of the state. Raises ValueError for state that set_extra_state cannot load."""
        columns = FORWARD_SLOTS * len(self._products), BACKWARD_SLOTS * len(self._products)
        try:
            return extra_state.unpack(extra_state.bytes_of(state), columns)
        except extra_state.Foreign as foreign:
            return foreign
        except extra_state.Unfit as error:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's '_extra_state' {error}; drop that key to load the rest, and "
                "scales start again."
            ) from None
