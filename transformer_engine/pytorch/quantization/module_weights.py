"""The FP8 copies of a module's weights that it keeps between microbatches (is_first_microbatch), each until a weight, a
recipe or a call asks for another one. Weights that are held in FP8 alone are primary_weights.py's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.quantization.module_plan import AGAIN, QUIET, RECORD, ModulePlan
from transformer_engine.pytorch.recompute_phase import recompute_phase
from transformer_engine.pytorch.torch_autocast import is_autocast


class KeptWeights:
    """kept: product -> (what the copy was made for, the copy)."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[tuple, _C.Quantized]] = {}

    def shared(self) -> KeptWeights:
        twin = KeptWeights()
        twin.kept = self.kept
        return twin

    def forget(self) -> None:
        """The next call makes them anew, in memory of their own: who has the old ones may read on."""
        self.kept = {}

    def set_aside(self) -> Callable[[], None]:
        """Forgets them until what is returned is called: then those are kept that were made since, and of the others
        the old ones."""
        before, self.kept = self.kept, {}
        return partial(self._join, before)

    def _join(self, before: dict[str, tuple]) -> None:
        self.kept = {**before, **self.kept}

    def copies_of(
        self, own: ModulePlan, products: tuple[str, ...], weights: list[torch.Tensor]
    ) -> list[_C.Quantized] | None:
        """copy_of() of each with first=False, where all are kept, for modules with hundreds; None: ask one by one."""
        if is_autocast(weights[0]):
            return None
        columnwise = own.plan.reads_columns and (torch.is_grad_enabled() or recompute_phase().enabled)
        copies = []
        for product, weight in zip(products, weights, strict=True):
            key, kept = self.kept.get(product, (None, None))
            fits = key == (own.plan, weight.shape, weight.device, weight.dtype)
            if not fits or (columnwise and kept.columnwise is None):
                return None
            copies.append(kept)
        return copies

    def copy_of(
        self,
        module: torch.nn.Module,
        own: ModulePlan,
        product: str,
        weight: torch.Tensor,
        first: bool | None,
        skip: torch.Tensor | None,
    ) -> _C.Quantized | None:
        """first: True quantizes and keeps, False takes what is kept. skip: a graph's flag on the device decides
        instead. None where a factory leaves this weight as it is."""
        # What the product itself would quantize: the cast's bits, not the parameter's.
        dtype = torch.get_autocast_dtype(weight.device.type) if is_autocast(weight) else weight.dtype
        key = (own.plan, weight.shape, weight.device, dtype)
        kept_key, kept = self.kept.get(product, (None, None))
        columnwise = own.plan.reads_columns and (torch.is_grad_enabled() or recompute_phase().enabled)
        if kept_key != key or (columnwise and kept.columnwise is None):
            kept = None
        recomputing = recompute_phase().recomputing
        if kept is not None and (recomputing or (skip is None and not first)):  # a recomputation reads what there is
            return kept
        index = module._products.index(product)
        quantizer = own.weight_quantizer(index, AGAIN if recomputing else RECORD if module.training else QUIET)
        if quantizer.kind == "none":
            return None
        with torch.no_grad(), torch.inference_mode(False):
            value = weight.detach().to(dtype)
            if kept is None or skip is None:  # a backward of another microbatch may still read what was kept
                made = _C.quantize(quantizer, value, True, columnwise)
                self.kept[product] = key, made
                return made
            # The graphs of one capture share it, the microbatches in flight too: it changes when a step begins.
            parts = (kept.rowwise, kept.rowwise_scale_inv, kept.columnwise, kept.columnwise_scale_inv)
            with torch.autograd._unsafe_preserve_version_counter(tuple(p for p in parts if p is not None)):
                return _C.quantize(quantizer, value, True, columnwise, skip, kept)
