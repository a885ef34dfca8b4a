"""Weights that a module holds in FP8 alone (quantized_model_init): they are found, checked against a recipe, given new
values by its scales, and converted in place. weights.py handles copies of other weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import has_compatible_shallow_copy_type
from transformer_engine.pytorch.quantization.module.plan import ModulePlan
from transformer_engine.pytorch.quantization.state.autocast_state import THREAD
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.layout import ROWWISE
from transformer_engine.pytorch.tensor.quantized_tensor import own_attributes
from transformer_engine.pytorch.tensor.values_view import ValuesView


def keep_high_precision(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """parameter.get_high_precision_init_val() -> a CPU copy of value, None once clear_high_precision_init_val() ran."""
    parameter._high_precision_init_val = value.detach().cpu().clone()
    parameter.get_high_precision_init_val = functools.partial(getattr, parameter, "_high_precision_init_val", None)
    parameter.clear_high_precision_init_val = functools.partial(setattr, parameter, "_high_precision_init_val", None)


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The dequantized values of a quantized tensor or of a view of one; differentiable. Other tensors unchanged."""
    if isinstance(tensor, ValuesView):
        return tensor.plain()
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    if isinstance(tensor, torch.nn.Parameter) and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        drop_columns(tensor)
    return tensor._differentiable()


def primary_weights(module: torch.nn.Module) -> list[tuple[int, str, QuantizedTensor]]:
    """(index of its product, name, weight) of the weights of a module that exist in FP8 alone."""
    named = [(i, name) for i, product in enumerate(module._products) for name in module._product_names(product)[0]]
    found = [(i, name, getattr(module, name)) for i, name in named]
    return [one for one in found if isinstance(one[2], QuantizedTensor)]


def as_product_reads(own: ModulePlan, weight: QuantizedTensor) -> _C.Quantized:
    """Its data, with columnwise data if a backward will read them."""
    handle = weight._native()
    if torch.is_grad_enabled() and own.plan.reads_columns:
        if handle.columnwise is None:
            with outside_of_modes():
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
            handle = weight._native()
        if THREAD.state.in_capture():  # replays read and write this memory
            weight._keeps_columnwise = True
    elif handle.columnwise is not None and drop_columns(weight):
        handle = weight._native()
    return handle


def drop_columns(weight: QuantizedTensor) -> bool:
    """Drops its columnwise data and returns True, if there are no gradients: the next call with gradients recomputes
    them."""
    derived = weight._derivable() and weight.get_usages()[ROWWISE]
    goes = derived and not (weight._keeps_columnwise or recompute_phase().enabled)
    if goes:
        weight.update_usage(columnwise_usage=False)
    return goes


def check_primary_weight(
    op: str, own: ModulePlan, index: int, weight: QuantizedTensor, init_recipe: Recipe | None
) -> None:
    """Raises if the recipe quantizes weights in another way than this one was: its scales would never be updated.
    init_recipe: the recipe of quantized_model_init."""
    wanted, has = own.weight_format(index), weight._quantizer
    fits = wanted is not None and wanted._makes_the_same(has, weight)
    if has is None and own.rule is None:  # loaded from a file, which stores no quantizer of delayed scaling
        fits = fits and not isinstance(init_recipe, DelayedScaling)
    if fits:
        return
    compatible = None if has is None else has._get_compatible_recipe()
    if init_recipe is None or not (compatible is None or init_recipe.custom() or isinstance(init_recipe, compatible)):
        init_name = type(weight).__name__ if compatible is None else compatible.__name__
    else:
        init_name = type(init_recipe).__name__
    runs_under, one, other = type(own.plan.recipe).__name__, type(has).__name__, type(wanted).__name__
    if one == other:
        one, other = repr(has), repr(wanted)
    raise RuntimeError(
        f"{op}: its weight is a {type(weight).__name__} that was quantized under {init_name} "
        f"(by {one}, in quantized_model_init), and runs under {runs_under} (whose weights need {other}): its scale "
        f"would never be updated. Run it under {init_name}, or build the module under "
        f"quantized_model_init(recipe={runs_under}(...)) and load the values."
    )


def adopt_primary_weight(own: ModulePlan, index: int, weight: QuantizedTensor) -> None:
    """Makes new values of the weight use the recipe's quantizer, with scales of this module."""
    wanted, has = own.python_quantizer(index, "weight", held=True), weight._quantizer
    own.weights[index] = weight._quantizer = wanted if has is None else has._adopting(wanted)
    if weight._quantizer is wanted:
        wanted._adopted(weight)


@torch.no_grad()
def _converted(parameter: QuantizedTensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `parameter`, and its gradient, could take the results of fn. It cannot leave the meta device."""
    converted = fn(parameter)
    if converted is not parameter:
        if not (
            isinstance(converted, QuantizedTensor)
            and parameter._same_format(converted)
            and parameter.shape == converted.shape
            and has_compatible_shallow_copy_type(parameter, converted)
        ):
            return False
        parameter.data = converted
    grad = parameter.grad
    if grad is not None:
        converted = fn(grad)
        if converted is not grad:
            grad.data = converted
    return True


@contextmanager
def converted_in_place(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Wraps torch's _apply, which replaces a converted tensor of several parts by a new one, without its marks and
    hooks; here the parameter itself takes the converted parts, and nothing happens if nothing changes."""
    quantized = {name: p for name, p in module._parameters.items() if isinstance(p, QuantizedTensor)}
    left = {name: own_attributes(p) for name, p in quantized.items() if not _converted(p, fn)}
    for name in quantized.keys() - left.keys():
        module._parameters[name] = None  # torch would do it again
    try:
        yield
    finally:
        for name in quantized.keys() - left.keys():
            module._parameters[name] = quantized[name]
    for name, attributes in left.items():
        if isinstance(module._parameters[name], QuantizedTensor):
            module._parameters[name].__dict__.update(attributes)
