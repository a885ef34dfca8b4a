"""A step of rows of an FP8 weight whose scale is known before: the pass writes them by the recipe's scale for the whole
weight, and every other row keeps its values under that scale. Frameworks that divide a weight's elements over ranks
step such rows, with the same scale on each. No arithmetic of Adam is here."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist

from transformer_engine.pytorch.tensor import Float8Tensor, engine
from transformer_engine.pytorch.tensor.utils import note_step_of_rows


@functools.cache
def _warn_of_other_ranks() -> None:
    warnings.warn(
        "FusedAdam: rows of a weight that is held in FP8 under delayed scaling are stepped in a job of several ranks, "
        "and the weight gets a new scale. A rank that steps none of its rows keeps the former scale, by which gathered "
        "bytes are other values, until transformer_engine.pytorch.tensor.utils.post_all_gather_processing(weights) is "
        "called there with it and others of its buffer of which this rank steps rows, as megatron-core does.",
        stacklevel=2,
    )


class StepOfRows:
    """All rows of one weight that a step writes. scale_inv: the step's, while the weight's own still describes the
    other rows."""

    def __init__(self, rows: Float8Tensor) -> None:
        self.weight: Float8Tensor = rows._rows_of[0]
        self.scale_inv = rows._scale_inv.clone()
        self.parts: list[Float8Tensor] = []
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            _warn_of_other_ranks()

    def complete(self, noop: torch.Tensor | None) -> Float8Tensor:
        """The whole weight, with matching bytes and scale again; if noop is set, so that the pass wrote nothing, with
        the former ones."""
        weight = self.weight
        places = [slice(p._rows_of[1], p._rows_of[1] + p.numel()) for p in self.parts]
        if sum(part.numel() for part in self.parts) < weight.numel():
            values = weight._dequantize(torch.float32).view(-1)
            for rows in places:
                values[rows] = 0.0
            amax = engine.amax(values)
            weight._quantizer._take_note_of(amax if noop is None else torch.where(noop == 0, amax, 0.0))
            data = weight._by_scale(values.view(weight.shape), self.scale_inv).reshape(-1)
            for rows, part in zip(places, self.parts):
                data[rows] = part._data.reshape(-1)
            weight._data.copy_(data.view(weight.shape))
        weight._scale_inv.copy_(self.scale_inv)
        note_step_of_rows(weight, noop)
        torch.autograd.graph.increment_version(self.parts)
        return weight
