"""Casts of masters into the same weights in every step, and columnwise data of these weights. The checks of utils.py
run again only if parts, quantizers or memory have changed. Bytes, scales and errors are those of utils.py.

Columnwise data stay in their memory between the two, with old values: nothing reads them before the gather has ended,
and a backward of an earlier forward raises, as their versions rise with each cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor import engine
from transformer_engine.pytorch.tensor.layout import COLUMNWISE
from transformer_engine.pytorch.tensor.utils import (
    Casts,
    post_all_gather_processing,
    quantize_master_weights,
    take_scales_of_the_step,
)

_BESIDE_PARTS = ("_quantizer", "_transpose_invalid")  # fields that decide, too, what a cast does


class MasterCasts:
    """quantize_master_weights of these lists, before post_all_gather_processing."""

    def __init__(
        self, weights: Sequence[Any], masters: Sequence[torch.Tensor | None], starts: Sequence[int | None], group: Any
    ) -> None:
        self._lists, self._group = (weights, masters, starts), group
        self._casts: Casts | None = None

    @torch.no_grad()
    def run(self) -> None:
        weights = self._lists[0]
        if not engine.is_plain() or _have_aliases(weights):
            self._casts = None
            quantize_master_weights(*self._lists, self._group, manual_post_all_gather_processing=True)
            return
        if self._casts is None or not self._is_current():
            self._keep(Casts("quantize_master_weights", (*self._lists, None)))
        self._casts.run(self._group)
        torch.autograd.graph.increment_version(self._columns)

    def _keep(self, casts: Casts) -> None:
        self._casts, self._kept, self._follows = casts, _C.KeptObjects(), True
        self._natives, self._columns = [], []
        for part, memory, master in zip(casts.parts, casts.memory, self._lists[1], strict=True):
            own = [] if master is None else [master]
            self._follows &= all(part.x.data_ptr() == t.data_ptr() for t in own)  # else it is a copy
            self._kept.add(part.weight, [*part.weight._parts, *_BESIDE_PARTS], [*memory, *own])
            fields = part.quantizer._engine_fields
            if fields is None:
                self._natives.append((part.quantizer, part.quantizer._built_in()))
            else:
                self._kept.add(part.quantizer, list(fields), [])
            columns = (getattr(part.weight, name) for name in part.weight._of_direction(COLUMNWISE))
            self._columns += [t for t in columns if t is not None]

    def _is_current(self) -> bool:
        if not self._follows or self._kept.changed() >= 0:
            return False
        return all(quantizer._built_in() is native for quantizer, native in self._natives)


class ColumnsOfWeights:
    """post_all_gather_processing of these weights."""

    def __init__(self, weights: Sequence[Any]) -> None:
        self.weights = list(weights)
        self._copies: _C.ColumnCopies | None = None

    @torch.no_grad()
    def make(self) -> None:
        is_kept = self._copies is not None and self._kept.changed() < 0
        if not is_kept or not engine.is_plain() or _have_aliases(self.weights):
            post_all_gather_processing(self.weights)
            self._keep()
            return
        take_scales_of_the_step(self.weights)
        self._copies.make()

    def _keep(self) -> None:
        copies, self._kept, self._copies = _C.ColumnCopies(), _C.KeptObjects(), None
        for weight in self.weights:
            parts = weight._tensors().values()
            found = weight._column_copy() if engine.is_plain(*parts) and weight.numel() else None
            if found is None:
                return
            rows, columns, *scales = found
            engine.of_one_version(columns, getattr(weight, weight._names(COLUMNWISE)[0]))
            copies.add(rows, columns, *scales)
            self._kept.add(weight, [*weight._parts, *_BESIDE_PARTS], list(parts))
        self._copies = copies


def _have_aliases(weights: Sequence[Any]) -> bool:
    """Whether other tensors share memory with some of them, which a write must reach."""
    for weight in weights:
        family = weight._family
        if family is not None and len(family) > 1:
            return True
    return False
