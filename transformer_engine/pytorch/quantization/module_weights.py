"""Weights that are quantized before a product asks: kept between microbatches, or never held in another form
(quantized_model_init). How a module's products are quantized is not decided here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled, mark_not_offload
from transformer_engine.pytorch.quantization.module_plan import AGAIN, QUIET, RECORD, ModuleQuantization
from transformer_engine.pytorch.quantization.products import plan_of
from transformer_engine.pytorch.quantization.surroundings import STATE
from transformer_engine.pytorch.recompute_phase import recompute_phase
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.layout import ROWWISE
from transformer_engine.pytorch.tensor.quantized_tensor import own_attributes
from transformer_engine.pytorch.tensor.values_view import ValuesView
from transformer_engine.pytorch.torch_autocast import is_autocast


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
            if self._parameters_recipe is None:
                self._parameters_recipe = STATE.chosen_recipe()
            own = ModuleQuantization(plan_of(self._parameters_recipe), self._roles(), self._weight_device())
            own.prepare(None, None)
            self._hold(own)
        for index, (name,) in enumerate(names):
            weight = getattr(self, name)
            if isinstance(weight, QuantizedTensor):
                continue
            quantizer = own.python_quantizer(index, "weight", held=True)
            if quantizer is None:
                continue
            quantized = torch.nn.Parameter(quantizer._held(weight), weight.requires_grad)
            if self.preserve_high_precision_init_val:
                keep_high_precision(quantized, weight)
            setattr(self, name, quantized)
            self._tag(name)

    def _quantized_weight(
        self, product: str, weight: torch.Tensor, is_first_microbatch: bool | None
    ) -> _C.Quantized | None:
        """The weight as the product reads it, or None where the product quantizes it itself.

        is_first_microbatch: True quantizes and keeps, False takes what was kept, None does neither. In a graph's
        capture its flag (set_skip_fp8_weight_update_tensor), where there is one, decides instead, in the kernel."""
        state = STATE
        if not state.enabled:
            return None
        if isinstance(weight, QuantizedTensor):
            return self._stays(self._primary_weight(product, weight))
        skip = state.skip_weight_update if state.in_capture() else None
        if (is_first_microbatch is None and skip is None) or torch.compiler.is_compiling():
            return None
        if isinstance(is_first_microbatch, torch.Tensor) or is_first_microbatch not in (None, True, False):
            raise ValueError(
                f"{type(self).__name__}: argument 'is_first_microbatch' is {is_first_microbatch!r}, wanted True, False "
                "or None."
            )
        kept = self._cached_weight(product, weight, is_first_microbatch, skip)
        return None if kept is None else self._stays(kept)

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
    ) -> _C.Quantized | None:
        own = self._own
        index = self._products.index(product)
        # What the product itself would quantize: the cast's bits, not the parameter's.
        dtype = torch.get_autocast_dtype(weight.device.type) if is_autocast(weight) else weight.dtype
        key = (own.plan, weight.shape, weight.device, dtype)
        kept_key, kept = self._cached_weights.get(product, (None, None))
        columnwise = own.plan.reads_columns and (torch.is_grad_enabled() or recompute_phase().enabled)
        if kept_key != key or (columnwise and kept.columnwise is None):
            kept = None
        recomputing = recompute_phase().recomputing
        if kept is not None and (recomputing or (skip is None and not first)):  # a recomputation reads what there is
            return kept
        variant = AGAIN if recomputing else RECORD if self.training else QUIET
        quantizer = own.weight_quantizer(index, variant)
        if quantizer.kind == "none":  # a factory leaves this weight as it is
            return None
        with torch.no_grad(), torch.inference_mode(False):
            value = weight.detach().to(dtype)
            if kept is None or skip is None:  # a backward of another microbatch may still read what was kept
                made = _C.quantize(quantizer, value, True, columnwise)
                self._cached_weights[product] = key, made
                return made
            # The graphs of one capture share it, the microbatches in flight too: it changes when a step begins.
            parts = (kept.rowwise, kept.rowwise_scale_inv, kept.columnwise, kept.columnwise_scale_inv)
            with torch.autograd._unsafe_preserve_version_counter(tuple(p for p in parts if p is not None)):
                return _C.quantize(quantizer, value, True, columnwise, skip, kept)

    @staticmethod
    def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Its values, where it is quantized, or a view of something that is; differentiable."""
        if isinstance(tensor, ValuesView):
            return tensor.plain()
        return tensor._differentiable() if isinstance(tensor, QuantizedTensor) else tensor

    def _primary_weight(self, product: str, weight: QuantizedTensor) -> _C.Quantized:
        index = self._products.index(product)
        if weight._quantizer is not self._own.weights.get(index, self):  # another one since the recipe was entered
            self._check_primary_weight(self._own, index, weight)
            self._adopt_primary_weight(self._own, index, weight)
        handle = weight._native()
        if torch.is_grad_enabled() and self._own.plan.reads_columns:
            if handle.columnwise is None:
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
                handle = weight._native()
            if STATE.in_capture():  # replays read and write this memory
                weight._keeps_columnwise = True
        elif handle.columnwise is not None and self._needs_no_columns(weight):
            weight.update_usage(columnwise_usage=False)
            handle = weight._native()
        return handle

    @staticmethod
    def _needs_no_columns(weight: QuantizedTensor) -> bool:
        """Whether its columnwise data can go where there are no gradients: the next call with them makes them again."""
        derived = weight._derivable() and weight.get_usages()[ROWWISE]
        return derived and not (weight._keeps_columnwise or recompute_phase().enabled)

    def _primary_weights(self) -> list[tuple[int, str, QuantizedTensor]]:
        """(index of its product, name, weight) of those that are held in FP8 alone."""
        named = [(i, name) for i, product in enumerate(self._products) for name in self._product_names(product)[0]]
        found = [(i, name, getattr(self, name)) for i, name in named]
        return [one for one in found if isinstance(one[2], QuantizedTensor)]

    def _check_primary_weight(self, own: ModuleQuantization, index: int, weight: QuantizedTensor) -> None:
        """Raises where the recipe would quantize it in another way: its scales would stay what they are for ever."""
        wanted, has, recipe = own.weight_format(index), weight._quantizer, self._parameters_recipe
        fits = wanted is not None and wanted._makes_the_same(has, weight)
        if has is None and own.rule is None:  # read from a file, which keeps no quantizer of delayed scaling
            fits = fits and not isinstance(recipe, DelayedScaling)
        if fits:
            return
        compatible = None if has is None else has._get_compatible_recipe()
        if recipe is None or not (compatible is None or recipe.custom() or isinstance(recipe, compatible)):
            made_under = type(weight).__name__ if compatible is None else compatible.__name__
        else:
            made_under = type(recipe).__name__
        runs_under, one, other = type(own.plan.recipe).__name__, type(has).__name__, type(wanted).__name__
        if one == other:
            one, other = repr(has), repr(wanted)
        raise RuntimeError(
            f"{type(self).__name__}: its weight is a {type(weight).__name__} that was quantized under {made_under} "
            f"(by {one}, in quantized_model_init), and runs under {runs_under} (whose weights want {other}): nothing "
            f"would ever make its scale anew. Run it under {made_under}, or build the module under "
            f"quantized_model_init(recipe={runs_under}(...)) and load the values."
        )

    def _before_loading(self, state_dict: Mapping[str, object], prefix: str) -> None:
        """A checkpoint's values bring their own scale, whatever steps the module has behind it."""
        for _, name, weight in self._primary_weights():
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == weight.shape:
                weight._values_to_come()

    def _loaded(self) -> None:
        self._cached_weights = {}  # of the weights that were there before
        own = self._own
        for index, _, weight in self._primary_weights():  # with assign=True they may be another module's
            if own is None or own.weight_format(index) is None:
                column = getattr(weight._quantizer, "_column", None)
                if column is not None and column.state is not self.fp8_meta.get("scaling_fwd"):
                    weight._quantizer = None
            elif own.weight_format(index)._makes_the_same(weight._quantizer, weight):
                self._adopt_primary_weight(own, index, weight)

    def _adopt_primary_weight(self, own: ModuleQuantization, index: int, weight: QuantizedTensor) -> None:
        """New values of it are quantized as the recipe has it, by scales of this module."""
        wanted, has = own.python_quantizer(index, "weight", held=True), weight._quantizer
        own.weights[index] = weight._quantizer = wanted if has is None else has._adopting(wanted)
        if weight._quantizer is wanted:
            wanted._adopted(weight)
