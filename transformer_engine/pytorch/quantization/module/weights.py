"""A module's weights in the form that its products read. Of weights in high precision it keeps FP8 copies between
microbatches (is_first_microbatch), each until a weight, a recipe or a call needs another one. primary_weights.py
handles weights that exist in FP8 alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_autocast import is_autocast
from transformer_engine.pytorch._internal.torch_private import unsafe_preserve_version_counter
from transformer_engine.pytorch.quantization.module.plan import QUIET, RECOMPUTE, RECORD, ModulePlan
from transformer_engine.pytorch.quantization.module.primary_weights import (
    adopt_primary_weight,
    as_product_reads,
    check_primary_weight,
)
from transformer_engine.pytorch.quantization.state.autocast_state import THREAD
from transformer_engine.pytorch.saved.marks import mark_not_offload
from transformer_engine.pytorch.saved.offload_scope import is_cpu_offload_enabled
from transformer_engine.pytorch.tensor import QuantizedTensor


class Made(NamedTuple):
    """The origin of a copy. Copies that were made together and alike share one object."""

    form: tuple  # the plan; the weight's shape, device and dtype, as torch.autocast casts it
    columnwise: bool  # whether the copy has columnwise data


class KeptWeights:
    """kept: product -> (the origin of the copy, the copy)."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Made, _C.Quantized]] = {}

    def shared(self) -> KeptWeights:
        twin = KeptWeights()
        twin.kept = self.kept
        return twin

    def forget(self) -> None:
        """The next call makes new copies, in memory of their own: readers of the old ones are not disturbed."""
        self.kept = {}

    def set_aside(self) -> Callable[[], None]:
        """Drops the copies until the returned function is called: then copies that were made since stay, and the old
        ones
        return for the other products."""
        before, self.kept = self.kept, {}
        return partial(self._join, before)

    def _join(self, before: dict[str, tuple]) -> None:
        self.kept = {**before, **self.kept}

    def copies_of(
        self,
        module: torch.nn.Module,
        own: ModulePlan,
        products: Mapping[str, int],
        weights: list[torch.Tensor],
        first: bool | None,
        skip: torch.Tensor | None,
    ) -> list[_C.Quantized | None]:
        """Copies for the products with these numbers, made in one buffer with as few launches as possible. first: True
        quantizes and keeps, False uses the kept copies. skip: a graph's flag on the device decides instead. None if a
        factory leaves a weight in high precision."""
        phase, columnwise = recompute_phase(), _reads_columns(own)
        forms = _forms(own, weights)
        copies = [self._fitting(*of, columnwise) for of in zip(products, forms, strict=True)]
        stays = phase.recomputing or (skip is None and not first)  # a recomputation reads the present copies
        due = {i: name for i, name in enumerate(products) if copies[i] is None or not stays}
        if not due:
            return copies
        variant = RECOMPUTE if phase.recomputing else RECORD if module.training else QUIET
        quantizers = {i: own.weight_quantizer(products[name], variant) for i, name in due.items()}
        for i in [i for i in due if quantizers[i].kind == "none"]:
            copies[i] = None
            del due[i]
        # The graphs of one capture share a copy, also between microbatches in flight: it changes when a step begins.
        # Without a graph, a backward of another microbatch may still read the kept copy.
        refilled = [i for i in due if copies[i] is not None and skip is not None]
        renewed = [i for i in due if copies[i] is None or skip is None]
        with torch.no_grad(), torch.inference_mode(False):
            values = {i: weights[i].detach().to(forms[i][-1]) for i in due}
            results = _C.quantize_list([quantizers[i] for i in renewed], [values[i] for i in renewed], True, columnwise)
            if refilled:
                _write(
                    [quantizers[i] for i in refilled],
                    [values[i] for i in refilled],
                    [copies[i] for i in refilled],
                    skip,
                )
        made = None
        for i, result in zip(renewed, results, strict=True):
            now = Made(forms[i], result.columnwise is not None)
            made = made if made == now else now
            self.kept[due[i]] = made, result
            copies[i] = result
        return copies

    def _fitting(self, product: str, form: tuple, columnwise: bool) -> _C.Quantized | None:
        made, kept = self.kept.get(product, (None, None))
        return kept if made is not None and made.form == form and (made.columnwise or not columnwise) else None

    def made_together(
        self, own: ModulePlan, products: tuple[str, ...], weight: torch.nn.Parameter
    ) -> list[_C.Quantized] | None:
        """The kept copies of all products, as copies_of() finds them one by one in ten times the time, if they were
        made together and fit `weight`, the first one: a call whose weights are not of one form is refused by its
        product. Else None."""
        made, _ = self.kept.get(products[0], (None, None))
        if made is None or made.form != _forms(own, [weight])[0] or (_reads_columns(own) and not made.columnwise):
            return None
        copies = [entry[1] for entry in map(self.kept.get, products) if entry is not None and entry[0] is made]
        return copies if len(copies) == len(products) else None


def _reads_columns(own: ModulePlan) -> bool:
    return own.plan.reads_columns and (torch.is_grad_enabled() or recompute_phase().enabled)


def _forms(own: ModulePlan, weights: list[torch.Tensor]) -> list[tuple]:
    # The product itself would quantize the result of torch.autocast's cast, not the parameter.
    dtypes = [weight.dtype for weight in weights]
    if is_autocast(weights[0]):
        cast = torch.get_autocast_dtype(weights[0].device.type)
        dtypes = [cast if is_autocast(weight) else weight.dtype for weight in weights]
    # Of a stack of weights, the form of each.
    return [(own.plan, w.shape[-2:], w.device, dtype) for w, dtype in zip(weights, dtypes, strict=True)]


class WeightCalls:
    """A base class of ModuleQuantization, which owns these fields."""

    own: ModulePlan | None
    weights: KeptWeights
    parameters_recipe: Recipe | None

    def of_weight(
        self, module: torch.nn.Module, product: str, weight: torch.Tensor, is_first_microbatch: bool | None
    ) -> _C.Quantized | None:
        """The weight in the form that the product reads, or None if the product quantizes it itself.

        is_first_microbatch: True quantizes and keeps, False uses the kept copy, None does neither. In a capture the
        graph's flag (set_skip_fp8_weight_update_tensor), if there is one, decides instead, in the kernel."""
        state = THREAD.state
        if not state.enabled:
            return None
        if is_first_microbatch is None and type(weight) is torch.nn.Parameter and not state.in_capture():
            return None
        products = {product: module._products.index(product)}
        return self.of_weights(module, [weight], is_first_microbatch, products)[0]

    def kept_of_all(
        self, module: torch.nn.Module, weight: torch.nn.Parameter, is_first_microbatch: bool | None
    ) -> list[_C.Quantized] | None:
        """of_weights() of all products where that is the copies that an earlier call kept for the first product's
        `weight` and the others; else None: of_weights() finds out."""
        if is_first_microbatch is not False or THREAD.state.in_capture() or is_cpu_offload_enabled():
            return None
        return self.weights.made_together(self.own, module._products, weight)

    def of_weights(
        self,
        module: torch.nn.Module,
        weights: list[torch.Tensor],
        is_first_microbatch: bool | None,
        products: Mapping[str, int] | None = None,
    ) -> list[_C.Quantized | None]:
        """of_weight() of each. products: their names and numbers, by default all of the module's."""
        state = THREAD.state
        if products is None:
            products = {name: i for i, name in enumerate(module._products)}
        copies = [
            self._of_primary_weight(module, index, weight) if isinstance(weight, QuantizedTensor) else None
            for index, weight in zip(products.values(), weights, strict=True)
        ]
        skip = state.skip_weight_update if state.in_capture() else None
        keeps = (is_first_microbatch is not None or skip is not None) and not torch.compiler.is_compiling()
        due = {name: at for at, name in enumerate(products) if copies[at] is None} if keeps else {}
        if due:
            if isinstance(is_first_microbatch, torch.Tensor) or is_first_microbatch not in (None, True, False):
                raise ValueError(
                    f"{type(module).__name__}: argument 'is_first_microbatch' is {is_first_microbatch!r}, wanted True, "
                    "False or None."
                )
            plain, numbers = [weights[at] for at in due.values()], {name: products[name] for name in due}
            kept = self.weights.copies_of(module, self.own, numbers, plain, is_first_microbatch, skip)
            for at, copy in zip(due.values(), kept, strict=True):
                copies[at] = copy
        if is_cpu_offload_enabled():
            for copy in copies:
                if copy is not None:  # the module holds it in any case: an offload would free no memory
                    mark_not_offload(copy.rowwise, copy.columnwise)
        return copies

    def _of_primary_weight(self, module: torch.nn.Module, index: int, weight: QuantizedTensor) -> _C.Quantized:
        own = self.own
        if weight._quantizer is not own.weights.get(index, self):  # replaced since the recipe was entered
            check_primary_weight(type(module).__name__, own, index, weight, self.parameters_recipe)
            adopt_primary_weight(own, index, weight)
        return as_product_reads(own, weight)


def _write(
    quantizers: list[_C.Quantizer], values: list[torch.Tensor], kept: list[_C.Quantized], skip: torch.Tensor
) -> None:
    """Refills copies in place, unless `skip` is set, without new versions: backwards read the tensors they saved."""
    parts = [(q.rowwise, q.rowwise_scale_inv, q.columnwise, q.columnwise_scale_inv) for q in kept]
    present = tuple(part for each in parts for part in each if part is not None)
    with unsafe_preserve_version_counter(present):
        _C.quantize_list_into(quantizers, values, kept, skip)
