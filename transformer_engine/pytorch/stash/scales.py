"""Scales and histories of delayed scaling around a step: as they were when it started, kept in memory that stays, so
that a step whose gate is up leaves none behind, on the device and in a captured step too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._internal.torch_private import foreach_copy_
from transformer_engine.pytorch.quantization.delayed import ScalingState


class StepScales:
    """Of the scaling states that there were at the last note(); a state that came since began with scales of 1 and an
    empty history."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] = []
        self._values: torch.Tensor | None = None  # theirs, one behind the other

    @torch.no_grad()
    def note(self, states: Sequence[ScalingState]) -> None:
        tensors = _tensors(states)
        if not tensors:
            self._noted, self._values = [], None
            return
        same = len(tensors) == len(self._noted) and all(a is b for a, b in zip(tensors, self._noted, strict=True))
        if self._values is None or not same:
            self._noted, self._values = tensors, _joined(tensors)
        else:
            torch.cat([t.view(-1) for t in tensors], out=self._values)

    @torch.no_grad()
    def put_back(self, states: Sequence[ScalingState], bad: torch.Tensor) -> None:
        """Where `bad`, a bool on their device, says so."""
        tensors = _tensors(states)
        if not tensors:
            return
        now, before = _joined(tensors), self._before(tensors)
        values = torch.where(bad, before, now).split([t.numel() for t in tensors])
        foreach_copy_(tensors, [v.view_as(t) for v, t in zip(values, tensors, strict=True)])
        for state in states:
            state.changed()

    def _before(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        if len(tensors) == len(self._noted) and all(a is b for a, b in zip(tensors, self._noted, strict=True)):
            return self._values
        noted = {}
        if self._values is not None:
            parts = self._values.split([t.numel() for t in self._noted])
            noted = {id(t): part for t, part in zip(self._noted, parts, strict=True)}
        fresh = [torch.ones_like(t) if t.dim() == 1 else torch.zeros_like(t) for t in tensors]
        return torch.cat([noted.get(id(t), new.view(-1)) for t, new in zip(tensors, fresh, strict=True)])


def _tensors(states: Sequence[ScalingState]) -> list[torch.Tensor]:
    return [t for state in states for t in (state.scale, state.amax_history)]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.view(-1) for t in tensors])
