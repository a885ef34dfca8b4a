"""Delayed scaling around replays: since a replay runs no module, this does what modules do for their scales in eager.

- Nothing is captured or quantized here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import RecomputePhase
from transformer_engine.pytorch._internal.torch_private import foreach_copy_
from transformer_engine.pytorch.graph.recorded.quantization import UsedScales
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState
from transformer_engine.pytorch.quantization.module.quantization import DIRECTIONS
from transformer_engine.pytorch.quantization.state.autocast_state import current_state

# How a backward reports to its region that it has run: a watch, and an index in it.
Watched = tuple[_C.BackwardWatch, int]


class Scales:
    """The scaling states of the modules that ran in a captured forward, which are updated around its replays.

    Amaxes are reduced over the group of the autocast around the call, as in eager; over that of an autocast inside the
    captured callable, if there is one; and over the group of the capture if the call is outside of any autocast.
    """

    def __init__(
        self,
        label: str,
        parts: Sequence[TransformerEngineBaseModule],
        used: Sequence[UsedScales],
        group: object | None,
    ) -> None:
        self.label, self.group = label, group
        self.parts = [one.part for one in used]  # in the order of eager, which is the same on all ranks
        # The memory that the graph reads: the dict of a module's states, the key, the state, and its tensors.
        self.captured: list[tuple[dict, str, ScalingState, torch.Tensor, torch.Tensor]] = []
        self._groups = [(one.inside, one.group) for one in used]
        for meta in (part.runtime.scaling_states() for part in self.parts):
            for key in DIRECTIONS:
                state = meta[key]
                self.captured.append((meta, key, state, state.amax_history, state.scale))
        self.states = [part.runtime.scaling_states()["scaling_fwd"] for part in self.parts]
        # The rows in which the forward records amaxes, and their lengths.
        self.amax_rows = [state.amax_history[0] for state in self.states]
        self.widths = [row.numel() for row in self.amax_rows]
        self._left: deque[tuple] = deque()  # entries of first runs, whose recomputations run in the same order
        # Kept alive: the graph reads their memory, even if the modules replace it in eager.
        self.kept_alive = [part.runtime.reads() for part in parts]
        self._prepare(group)

    def _prepare(self, around: object | None) -> None:
        """Prepares the entries of a region, for forward and backward."""
        self._prepared_for = around
        self.forward: dict[int, tuple] = {}
        self.backward: dict[int, tuple] = {}
        for part, (inside, group) in zip(self.parts, self._groups):
            for key, table in zip(DIRECTIONS, (self.forward, self.backward)):
                state = part.runtime.scaling_states()[key]
                table[id(state)] = weakref.ref(state), group if inside else around

    # ---- at a replay ----

    def enter_region(self) -> tuple[Region, Region | None]:
        """(the region of a call, with the states of the callable added; the same region if no autocast surrounds the
        call, so that the call has to update it, else None)."""
        self._check_captured()
        state = current_state()
        around = state.group if state.active else self.group
        if around is not self._prepared_for:
            self._prepare(around)
        region, own_region = state.region, None
        if region is None:
            region = own_region = Region()
        region.add_all(self.forward, self.backward)
        return region, own_region

    def join_region(self) -> tuple[Watched | None, Region | None]:
        """At a replay with gradients: (what its backward reports to, the second result of enter_region)."""
        region, own_region = self.enter_region()
        if region.claimed:
            return None, own_region
        watch = region.watch()
        return (watch, watch.take()), own_region

    def first_run(self, phase: RecomputePhase, backward: bool) -> tuple[Watched | None, Region | None]:
        """As join_region, at a call that is recomputed later: stores for the recomputation the scales that this call
        reads and, without gradients, what the recomputation's backward reports to. backward: this call has one, too."""
        region, own_region = self.enter_region()
        grad, watched = torch.is_grad_enabled(), None
        if not region.claimed and (backward or not grad):
            watch = region.watch()
            watched = watch, watch.take()
        entry = [state.used() for state in self.states], None if grad else watched
        phase.leave(self, entry)
        return watched if grad else None, own_region

    def left_in_order(self) -> deque[tuple]:
        return self._left

    @torch.no_grad()
    def recompute(self, phase: RecomputePhase) -> tuple[Watched | None, Callable[[], None]]:
        """At a recomputation, which reads the scales of its first run and records only amaxes of its backward: (what
        the backward reports to, a function that restores the present scales and amaxes after the forward).
        RuntimeError if the first run stored none."""
        self._check_captured()
        entry = phase.take(self)
        if entry is None:
            raise RuntimeError(
                f"{self.label}: a recomputed call needs the scales of its first run, but that run stored none; run it "
                "inside activation_recompute_forward(activation_recompute=True), or use te.checkpoint."
            )
        scales, watched = entry
        if watched is not None and watched[0].reached(watched[1]):
            watched = None
        present = [state.scale for state in self.states]
        restore = self._restore_of(self.amax_rows + present, self.widths * 2)
        foreach_copy_(present, scales)
        return watched, restore

    @torch.no_grad()
    def restore_amaxes(self) -> Callable[[], None]:
        """Before a forward that records no amaxes in eager: returns a function that restores them after it."""
        return self._restore_of(self.amax_rows, self.widths)

    @staticmethod
    def _restore_of(tensors: list[torch.Tensor], widths: list[int]) -> Callable[[], None]:
        return partial(foreach_copy_, tensors, torch.cat(tensors).split(widths))

    def _check_captured(self) -> None:
        for meta, key, state, history, scale in self.captured:
            if meta.get(key) is not state or state.amax_history is not history or state.scale is not scale:
                self._refuse(meta)

    def _refuse(self, meta: dict) -> None:
        part = next(part for part in self.parts if part.runtime.scaling_states() is meta)
        raise RuntimeError(
            f"{self.label}: a {type(part).__name__} has other scales than when it was captured (another recipe or "
            "history length, a move), but the graph reads the old ones; capture again."
        )
