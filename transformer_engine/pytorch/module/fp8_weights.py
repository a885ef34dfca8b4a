"""Weights that are quantized before a product asks: kept between microbatches, or never held in another form
(quantized_model_init). How a module's products are quantized is not decided here."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled, mark_not_offload
from transformer_engine.pytorch.distributed.recompute import recompute_phase
from transformer_engine.pytorch.module.quantized import AGAIN, QUIET, RECORD, ModuleQuantization
from transformer_engine.pytorch.quantization.products import SCALING_OF_KIND, plan_of
from transformer_engine.pytorch.quantization.state import STATE
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor.quantized_tensor import own_attributes


def keep_high_precision(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """parameter.get_high_precision_init_val() -> a CPU copy of value, None once clear_high_precision_init_val() ran."""
    parameter._high_precision_init_val = value.detach().cpu().clone()
    parameter.get_high_precision_init_val = functools.partial(getattr, parameter, "_high_precision_init_val", None)
    parameter.clear_high_precision_init_val = functools.partial(setattr, parameter, "_high_precision_init_val", None)


@torch.no_grad()
def _converted_in_place(parameter: QuantizedTensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `parameter`, and its gradient, could take what fn makes of them. It cannot leave the meta device."""
    converted = fn(parameter)
    if converted is not parameter:
        if not (
            isinstance(converted, QuantizedTensor)
            and parameter._same_format(converted)
            and parameter.shape == converted.shape
            and torch._has_compatible_shallow_copy_type(parameter, converted)
        ):
            return False
        parameter.data = converted
    grad = parameter.grad
    if grad is not None:
        converted = fn(grad)
        if converted is not grad:
            grad.data = converted
    return True


def _in_torch_autocast(t: torch.Tensor) -> bool:
    """Whether torch.autocast casts it before an op reads it, as csrc's autocast() does."""
    return (
        t.device.type in ("cpu", "cuda")
        and torch.is_autocast_enabled(t.device.type)
        and t.is_floating_point()
        and t.dtype is not torch.float64
    )


class QuantizedWeights(torch.nn.Module):
    """The weights' part of QuantizationState, whose fields these are."""

    _products: tuple[str, ...] = ()
    _own: ModuleQuantization | None

    @torch.no_grad()
    def _quantize_parameters(self) -> None:
        """Under quantized_model_init the products' weights, just initialised, become quantized tensors."""
        if not self.primary_weights_in_fp8:
            return
        names = [self._product_names(product)[0] for product in self._products]
        if any(len(weights) > 1 for weights in names):
            raise NotImplementedError(
                f"{type(self).__name__}: quantized_model_init with the weight in several parameters {names}, which are "
                "scaled as one, is not available in this version; build the module without parameters_split "
                "(fuse_qkv_params=True in attention)."
            )
        own = self._own
        if own is None:
            plan = plan_of(self._parameters_recipe or STATE.chosen_recipe())
            own = ModuleQuantization(plan, self._roles(), self._weight_device())
            own.prepare(None, None)
            self._hold(own)
        for index, (name,) in enumerate(names):
            weight = getattr(self, name)
            if isinstance(weight, QuantizedTensor):
                continue
            quantizer = own.python_quantizer(index, "weight")
            if quantizer is None:
                continue
            own.start_at(index, "weight", weight)
            quantized = torch.nn.Parameter(quantizer(weight.detach()), weight.requires_grad)
            if self.preserve_high_precision_init_val:
                keep_high_precision(quantized, weight)
            setattr(self, name, quantized)
            self._tag(name)

    def _quantized_weight(
        self, product: str, weight: torch.Tensor, is_first_microbatch: bool | None
    ) -> _C.Quantized | None:
        """The weight as the product reads it, or None where the product quantizes it itself.

        is_first_microbatch: True quantizes and keeps, False takes what was kept, None does neither. Under a graph's
        flag (set_skip_fp8_weight_update_tensor) the kernel decides instead."""
        state = STATE
        if not state.enabled:
            return None
        if isinstance(weight, QuantizedTensor):
            return self._stays(self._primary_weight(product, weight))
        if (is_first_microbatch is None and state.skip_weight_update is None) or torch.compiler.is_compiling():
            return None
        if isinstance(is_first_microbatch, torch.Tensor) or is_first_microbatch not in (None, True, False):
            raise ValueError(
                f"{type(self).__name__}: argument 'is_first_microbatch' is {is_first_microbatch!r}, wanted True, False "
                "or None."
            )
        return self._stays(self._cached_weight(product, weight, is_first_microbatch, state.skip_weight_update))

    def _apply(self, fn, recurse=True):
        """torch swaps a converted tensor of several parts for a new one, without the marks and the hooks that were on
        it; here the parameter itself takes the converted parts, and nothing happens where nothing changes."""
        quantized = {name: p for name, p in self._parameters.items() if isinstance(p, QuantizedTensor)}
        left = {name: own_attributes(p) for name, p in quantized.items() if not _converted_in_place(p, fn)}
        for name in quantized.keys() - left.keys():
            self._parameters[name] = None  # torch's part is done
        try:
            super()._apply(fn, recurse)
        finally:
            for name in quantized.keys() - left.keys():
                self._parameters[name] = quantized[name]
        for name, attributes in left.items():
            if isinstance(self._parameters[name], QuantizedTensor):
                self._parameters[name].__dict__.update(attributes)
        return self

    @staticmethod
    def _stays(weight: _C.Quantized) -> _C.Quantized:
        """The module holds it whatever a graph saves: that it leaves for the CPU would give nothing back."""
        if is_cpu_offload_enabled():
            mark_not_offload(weight.rowwise, weight.columnwise)
        return weight

    def _cached_weight(
        self, product: str, weight: torch.Tensor, first: bool | None, skip: torch.Tensor | None
    ) -> _C.Quantized:
        own = self._own
        index = self._products.index(product)
        # What the product itself would quantize: the cast's bits, not the parameter's.
        dtype = torch.get_autocast_dtype(weight.device.type) if _in_torch_autocast(weight) else weight.dtype
        key = (own.plan, weight.shape, weight.device, dtype)
        kept_key, kept = self._cached_weights.get(product, (None, None))
        columnwise = torch.is_grad_enabled() or recompute_phase().enabled
        if kept_key != key or (columnwise and kept.columnwise is None):
            kept = None
        recomputing = recompute_phase().recomputing
        if kept is not None and skip is None and (not first or recomputing):
            return kept
        variant = AGAIN if recomputing else RECORD if self.training else QUIET
        quantizer = own.weight_quantizer(index, variant)
        flag = None if kept is None else skip
        with torch.no_grad(), torch.inference_mode(False):
            made = _C.quantize(quantizer, weight.detach().to(dtype), True, columnwise, flag, kept)
        self._cached_weights[product] = key, made
        return made

    @staticmethod
    def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Its values, where it is quantized; differentiable."""
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor

    def _primary_weight(self, product: str, weight: QuantizedTensor) -> _C.Quantized:
        source = self._own.sources[self._products.index(product)]["weight"]
        handle = weight._native()
        if not isinstance(source, Quantizer) and source is not None and handle.scaling != SCALING_OF_KIND[source[0]]:
            raise RuntimeError(
                f"{type(self).__name__}: its weight is a {type(weight).__name__} in other blocks than "
                f"{type(self.fp8_meta['recipe']).__name__} has; run it under the recipe that quantized_model_init had."
            )
        if torch.is_grad_enabled() and handle.columnwise is None:
            weight.update_usage(rowwise_usage=True, columnwise_usage=True)
            handle = weight._native()
        return handle
