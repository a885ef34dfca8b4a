"""Scales of delayed scaling around replays, in which no module runs: what modules do about them in eager. Captures and
quantizes nothing."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import RecomputePhase
from transformer_engine.pytorch._internal.torch_private import foreach_copy_
from transformer_engine.pytorch.graph.recorded.quantization import Noted
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState
from transformer_engine.pytorch.quantization.module.quantization import DIRECTIONS
from transformer_engine.pytorch.quantization.state.autocast_state import current_state

# What tells a backward's region that it was reached: a watch, and a place in it.
Watched = tuple[_C.BackwardWatch, int]


class Scales:
    """The scaling states of the modules that ran in a captured forward, to be updated around its replays.

    Amaxes are reduced over the group of the autocast around a call, as in eager: of an autocast inside of what is
    captured that one's, and outside of any autocast the group of the capture."""

    def __init__(
        self, label: str, parts: Sequence[TransformerEngineBaseModule], noted: Sequence[Noted], group: object | None
    ) -> None:
        self.label, self.group = label, group
        self.parts = [one.part for one in noted]  # in eager's order, which is the same on all ranks
        # A module's memory of scales, the state that it has there, and its tensors: what the graph reads.
        self.known: list[tuple[dict, str, ScalingState, torch.Tensor, torch.Tensor]] = []
        self._groups = [(one.inside, one.group) for one in noted]
        for meta in (part.runtime.scaling_states() for part in self.parts):
            for key in DIRECTIONS:
                state = meta[key]
                self.known.append((meta, key, state, state.amax_history, state.scale))
        self.states = [part.runtime.scaling_states()["scaling_fwd"] for part in self.parts]
        # Where the forward records amaxes, and how many there are in each.
        self.rows = [state.amax_history[0] for state in self.states]
        self.widths = [row.numel() for row in self.rows]
        self._left: deque[tuple] = deque()  # by first runs whose recomputations come in their order
        # The graph reads their memory, whatever the modules do in eager.
        self.kept = [part.runtime.reads() for part in parts]
        self._prepare(group)

    def _prepare(self, around: object | None) -> None:
        """A region's entries: forward's and backward's."""
        self._prepared_for = around
        self.forward: dict[int, tuple] = {}
        self.backward: dict[int, tuple] = {}
        for part, (inside, group) in zip(self.parts, self._groups):
            for key, table in zip(DIRECTIONS, (self.forward, self.backward)):
                state = part.runtime.scaling_states()[key]
                table[id(state)] = weakref.ref(state), group if inside else around

    # ---- at a replay ----

    def enter(self) -> tuple[Region, Region | None]:
        """(the region around a call, which its states enter; that region once more where there is no autocast, and it
        is to be updated behind the call)."""
        self._check_known()
        state = current_state()
        around = state.group if state.active else self.group
        if around is not self._prepared_for:
            self._prepare(around)
        region, alone = state.region, None
        if region is None:
            region = alone = Region()
        region.add_all(self.forward, self.backward)
        return region, alone

    def join(self) -> tuple[Watched | None, Region | None]:
        """At a replay with gradients: (what its backward tells that it was reached; enter's second)."""
        region, alone = self.enter()
        if region.claimed:
            return None, alone
        watch = region.watch()
        return (watch, watch.take()), alone

    def first_run(self, phase: RecomputePhase, backward: bool) -> tuple[Watched | None, Region | None]:
        """As join, at a call that is recomputed later: its recomputation is left the scales that this one reads, and,
        where no gradients are recorded, what it tells that it was reached. `backward`: this call has one of its own."""
        region, alone = self.enter()
        grad, watched = torch.is_grad_enabled(), None
        if not region.claimed and (backward or not grad):
            watch = region.watch()
            watched = watch, watch.take()
        entry = [state.used() for state in self.states], None if grad else watched
        phase.leave(self, entry)
        return watched if grad else None, alone

    def left_in_order(self) -> deque[tuple]:
        return self._left

    @torch.no_grad()
    def again(self, phase: RecomputePhase) -> tuple[Watched | None, Callable[[], None]]:
        """At a recomputation, which reads what its first run read, and records the amaxes of its backward alone: (what
        that tells that it was reached; what puts the scales of now back behind the forward, and their amaxes).
        RuntimeError where the first run left none."""
        self._check_known()
        entry = phase.take(self)
        if entry is None:
            raise RuntimeError(
                f"{self.label}: a recomputed call needs the scales of its first run, but that run left none; run it "
                "inside activation_recompute_forward(activation_recompute=True), or use te.checkpoint."
            )
        scales, watched = entry
        if watched is not None and watched[0].reached(watched[1]):
            watched = None
        live = [state.scale for state in self.states]
        put_back = self._kept(self.rows + live, self.widths * 2)
        foreach_copy_(live, scales)
        return watched, put_back

    @torch.no_grad()
    def noted_rows(self) -> Callable[[], None]:
        """Puts back the amaxes that a forward is about to record, where eager records none."""
        return self._kept(self.rows, self.widths)

    @staticmethod
    def _kept(tensors: list[torch.Tensor], widths: list[int]) -> Callable[[], None]:
        return partial(foreach_copy_, tensors, torch.cat(tensors).split(widths))

    def _check_known(self) -> None:
        for meta, key, state, history, scale in self.known:
            if meta.get(key) is not state or state.amax_history is not history or state.scale is not scale:
                self._refuse(meta)

    def _refuse(self, meta: dict) -> None:
        part = next(part for part in self.parts if part.runtime.scaling_states() is meta)
        raise RuntimeError(
            f"{self.label}: a {type(part).__name__} has other scales than when it was captured (another recipe or "
            "history length, a move), and the graph knows the old ones; capture again."
        )
