"""One call of a module under delayed scaling: whether it records amaxes, which scales a recomputed forward reads, and
which observers get its output. quantization/delayed.py computes scales."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import RecomputePhase, recompute_phase
from transformer_engine.pytorch.quantization.delayed import Region
from transformer_engine.pytorch.quantization.module.plan import QUIET, RECOMPUTE, RECORD, ModulePlan
from transformer_engine.pytorch.quantization.state.autocast_state import AutocastState


def kind_of_call(module: torch.nn.Module, phase: RecomputePhase) -> int:
    """RECORD, QUIET or RECOMPUTE for a call under delayed scaling."""
    if phase.recomputing:
        return RECOMPUTE
    return RECORD if module.training and (phase.enabled or torch.is_grad_enabled()) else QUIET


def _register(region: Region, own: ModulePlan, group: object | None) -> None:
    if not region.has(own.forward):
        region.add(own.forward, group, forward=True)
        region.add(own.backward, group, forward=False)


class DelayedCalls:
    """A base class of ModuleQuantization, which owns these fields. unfollowed: called with the call's output."""

    meta: dict[str, object]
    unfollowed: Callable[[torch.Tensor], None] | None

    def variant(self, module: torch.nn.Module, state: AutocastState, own: ModulePlan, index: int) -> int:
        """Of a call; the module's first product decides what is kept for the whole call."""
        phase = recompute_phase()
        kind = kind_of_call(module, phase)
        if kind == RECOMPUTE:
            if index == 0:
                scales, watched = self._take(type(module).__name__, phase)
                own.use_recompute_scales(scales)
                self.unfollowed = None
                if watched is not None:
                    watch, place = watched
                    if not watch.reached(place):  # recomputed before its backward
                        self.unfollowed = functools.partial(watch.follow, place=place)
            return kind
        if index == 0 and kind == RECORD:
            if state.noted is not None:
                state.noted.setdefault(module, (state.token, state.group))
            region = None if state.capturing else state.region
            if region is not None:
                _register(region, own, state.group)
                self.unfollowed = None if region.claimed else region.follow
            if phase.enabled:
                self._leave_for_recompute(state, phase, own)
        return kind

    def _leave_for_recompute(self, state: AutocastState, phase: RecomputePhase, own: ModulePlan) -> None:
        watched = None
        if self.unfollowed is not None and not torch.is_grad_enabled():  # only the recomputed output will have a graph
            self.unfollowed = None
            watch = state.region.watch()
            watched = watch, watch.take()
        # In a capture, a copy made outside of it would have the same values at each replay.
        scales = own.forward.scale.clone() if state.capturing else own.forward.used()
        phase.leave(self, (scales, watched))

    def left_in_order(self) -> deque:
        """The entries of first runs whose phases the caller set."""
        return self.meta.setdefault("scales_for_recompute", deque())

    def _take(self, op: str, phase: RecomputePhase) -> tuple[torch.Tensor, tuple[_C.BackwardWatch, int] | None]:
        entry = phase.take(self)
        if entry is None:
            raise RuntimeError(
                f"{op}: a recomputed forward needs the scales of its first run, but that run left "
                "none; run it in training mode inside activation_recompute_forward(activation_recompute=True), or use "
                "te.checkpoint."
            )
        return entry

    def follow(self, output: torch.Tensor) -> None:
        """Called with the output of a quantized call: scales change when the backward through it has ended."""
        follow = self.unfollowed
        if follow is not None:
            self.unfollowed = None
            if output.requires_grad:
                follow(output)
