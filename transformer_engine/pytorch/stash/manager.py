"""PagedStash, the public class. csrc/stash/stash_pool.h copies, csrc/stash/stash_step.h decides when a group is stored
and loaded, and schedule.py has the order of the groups."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch.graph.memory.replay_order import ReplayOrder
from transformer_engine.pytorch.graph.observers import Observer, observe_captures, result_made
from transformer_engine.pytorch.stash.arguments import (
    POLICIES,
    check_counter,
    check_name,
    check_options,
    check_tail,
    check_tensors,
    checked_device,
)
from transformer_engine.pytorch.stash.plan import Plan, Step, is_complete, operations_of
from transformer_engine.pytorch.stash.schedule import Operation, Schedule, not_last_in, operations
from transformer_engine.pytorch.stash.segments import copy_originals
from transformer_engine.pytorch.stash.snapshot import Snapshot
from transformer_engine.pytorch.stash.verdict import Verdict, good_verdict, verdict_of
from transformer_engine.pytorch.verdict import Mailbox, watch_of

MAX_GROWS = 8  # a pool that is too small after these has another fault


class PagedStash(_C.StashCore):
    """Keeps the live rows of tensors that layers save for backward in pages of one pool.

    page_bytes: a multiple of 128. device_pages: None sizes the pool by the counts of the first step, which keeps all
    tensors, times `factor`. host_pages: pinned pages, used when no device page is free. policy: "ring", "stack", or
    "bump", which needs a schedule that is first in, last out. overflow: a group without room is lost, its reload is NaN
    and the gate is raised; "spill" does no more, "raise_at_step_end" raises after the verdict has arrived, "trap" ends
    the process. sm_budget: blocks of a copy. low_water: with fewer free device pages than this, the group with the
    latest backward moves to host pages. debug: checks canaries, checksums and leaks. device: of the tensors.
    Errors: ValueError naming the argument.
    """

    def __init__(
        self,
        page_bytes: int = 524288,
        device_pages: int | None = None,
        host_pages: int = 0,
        factor: float = 1.2,
        policy: str = "ring",
        overflow: str = "spill",
        sm_budget: int = 48,
        *,
        low_water: int = 0,
        debug: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        check_options({k: v for k, v in locals().items() if k not in ("self", "device", "__class__")})
        super().__init__(checked_device(device))
        self.page_bytes, self.device_pages, self.host_pages = page_bytes, device_pages, host_pages
        self.factor, self.policy, self.overflow = float(factor), policy, overflow
        self.sm_budget, self.low_water, self.debug = sm_budget, low_water, debug
        self.schedule = Schedule()
        self.sized: Step | None = None  # the last step that recorded its sizes
        self.step = Step(self, records=True)
        self._sized = device_pages is not None
        self._mailbox: Mailbox | None = None  # of the pool
        self._first_step = 0  # number of the pool's first step
        self._gate: torch.Tensor | None = None
        self._gates: dict[object, torch.Tensor] = {}  # by process group or watch
        self._names: list[Hashable] = []  # of the last step's stores
        self.recorded_pages: dict[Hashable, int] = {}  # of each group; filled with low_water
        self._unfinished: list = []  # the last step's trace where it ended early
        self._grows = 0
        self._snapshot = Snapshot()
        self._orders: weakref.WeakSet[ReplayOrder] = weakref.WeakSet()  # of captures that hold the pool's addresses
        self._captured_reset = False  # reset() was called inside of the pass that is captured

    def __deepcopy__(self, memo: dict) -> PagedStash:
        """Returns itself: a copied model shares the stash and its steps."""
        return self

    # ---- groups ----

    def mark_pageable(self, tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int = 1) -> None:
        """Declares that only the first counter * unit_rows rows of `tensor` are live whenever it is saved."""
        _C.declare_rows(tensor, counter, unit_rows)

    def group(self, name: Hashable, counts: torch.Tensor | None = None, *, tail: str = "zero") -> _C.StashScope:
        """`with stash.group(name, counts):` around a layer stashes the tensors saved inside whose live rows are known.
        counts: one integer on the device, the live rows of tensors that modules of this library save;
        mark_pageable() declares other tensors. tail: rows behind the live ones that a reload fills with zeros: "zero"
        (all), "tile" (to the next multiple of 128) or "keep" (none). Does nothing where no backward is recorded.
        Errors: TypeError, ValueError for the arguments; RuntimeError on entering it inside of another group.
        """
        group = _C.stash_group(self, name, counts, tail)
        if group is None:
            self._check_open("group")
            check_name("group", name)
            check_tail("group", tail)
            check_counter("group", counts, self.device)
        return group

    def stash(
        self,
        group: Hashable,
        tensors: Sequence[torch.Tensor],
        counts: torch.Tensor | Sequence[torch.Tensor],
        *,
        unit_rows: int = 1,
        tail: str = "zero",
    ) -> _C.StashHandle:
        """Stashes the live rows of tensors: the first counts * unit_rows of each first dimension. counts: one integer
        on the device for all, or one each. The tensors are not held; the current stream waits until they may be freed.
        Shapes: any with a first dimension; contiguous, up to 16 of them. Dtypes: any.
        Errors: TypeError, ValueError naming the argument; RuntimeError inside of a backward.
        """
        handle = _C.stash_tensors(self, group, tensors, counts, unit_rows, tail)
        if handle is None or handle.state == "kept":
            self._check_open("stash")
            check_name("stash", group)
            check_tail("stash", tail)
            counted = check_tensors(tensors, counts, unit_rows, self.device)
            if handle is None:
                unit = min(int(unit_rows), 2**62)  # larger ones fit tensors of 0 rows alone
                handle = _C.stash_tensors(self, group, *map(list, zip(*counted, strict=True)), unit, tail)
            if handle.state == "kept":
                copy_originals(handle, counted, unit_rows, tail)
        return handle

    def reload(self, handle: _C.StashHandle, keep: bool = False) -> list[torch.Tensor]:
        """New tensors with the live rows of those passed to stash(), and the tail. keep: keeps the pages for another
        reload; by default they are given back.
        Errors: TypeError where the argument is no handle of stash(); RuntimeError where its pages are gone.
        """
        return _C.stash_reload(self, handle, keep)

    # ---- schedulers ----

    def pre_schedule(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x. Call it before the layers of a group. Its forward waits for the copy of the last group and frees
        its originals. Its backward, after the layers', starts to load the next group where a backward is next."""
        return _C.stash_pre(self, x)

    def post_schedule(self, y: torch.Tensor) -> torch.Tensor:
        """Returns y. Call it after the layers of a group. Its forward starts to store the group unless the group's own
        backward is next, and starts to load another group whose backward is next. Its backward, which runs before the
        layers', frees originals and waits until this group is loaded.
        Errors: RuntimeError where the schedule has another entry at this point."""
        y = _C.stash_post(self, y)
        if is_graph_capturing():
            result_made()
        return y

    def schedule_from_order(self, order: Sequence[int | float], layers_per_chunk: int | Sequence[int] = 1) -> None:
        """Sets the order of a step, as for make_graphed_callables, instead of recording it: +c is a forward of chunk
        c, -c the backward of its oldest one. Groups take the places of a chunk's layers in the order of their first
        forwards."""
        self._check_open("schedule_from_order")
        if self.schedule.position:
            raise RuntimeError("PagedStash.schedule_from_order: called within a step; call it directly after reset().")
        schedule = Schedule(order, layers_per_chunk)
        self._check_order(operations(schedule.entries))
        self.schedule = schedule

    # ---- steps ----

    def reset(self, record: bool = False) -> None:
        """Starts a step: frees all pages, clears flags and gate, and sends the verdict on the last step. Call it before
        each step; a captured step captures it. record: records the order and sizes of this step again.
        Errors: with "raise_at_step_end", RuntimeError for a bad verdict; the step has started nevertheless.
        Warns where the last step ended early or stashed nothing, or where stashing costs memory.
        """
        self._check_open("reset")
        captured = self._next_step(record)
        if self.overflow == "raise_at_step_end" and not captured and (verdict := self.verdict()) is not None:
            verdict.raise_if_bad()

    def verdict(self, wait: bool = False) -> Verdict | None:
        """The verdict on the last step whose report has arrived and was not read yet, else None; does not wait. wait:
        the verdict on the current step, after waiting for the device; a step that keeps everything, as the first one
        does, is good."""
        self._check_open("verdict")
        if self._pool is None:
            return good_verdict(self._first_step) if wait else None
        if not wait:
            report = self._mailbox.read()
            return None if report is None else verdict_of(report, self._names, self._first_step)
        self._wait_for_replays()
        self._restore_scales()
        self._pool.report(self._mailbox.memory)
        return verdict_of(self._mailbox.peek(), self._names_of(self.step), self._first_step)

    def gate(self, group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """float32 [] on the device: 1 where this step has a flag, else 0. Pass it as the `found_inf` of FusedAdam and
        torch's fused optimizers, which then skip the step. Each call writes the same tensor, from the first
        te.verdict.watch() of the device on another one, which is 1 where rows were cut, too. group: returns the maximum
        over these ranks in another tensor, by one all-reduce on the device; every rank calls it in each step, also
        ranks without groups."""
        self._check_open("gate")
        self._wait_for_replays()
        if self._pool is not None:
            self._pool.join()
        gate = self._own_gate()
        if (watch := watch_of(self.device)) is not None:
            own, gate = gate, self._gate_of(watch)
            torch.maximum(own, watch.gate(), out=gate)
        if group is not None:
            own, gate = gate, self._gate_of(group)
            gate.copy_(own)
            torch.distributed.all_reduce(gate, torch.distributed.ReduceOp.MAX, group=group)
        self._snapshot.restore_scales(gate, None)
        return gate

    def grow(self, recapture: Callable[[], object] | None = None) -> int:
        """Call it after a step: makes a pool of the device pages that the step demanded times `factor`, returns their
        number and starts the next step. recapture: captures the graphs again that hold the old pool's addresses and
        must not be replayed; required if the pool was captured. Waits for the device.
        Errors: RuntimeError for a captured pool without recapture, for a pool that is large enough, or after eight
        calls.
        """
        self._check_open("grow")
        verdict = self.verdict(wait=True)
        have = 0 if self._pool is None else self._pool.native.device_pages
        demand = verdict.report["demand"]
        wanted = -int(-demand * self.factor // 1)
        if self._pool is not None and self._pool.captured and recapture is None:
            raise RuntimeError(
                "PagedStash.grow: graphs were captured with this pool and hold its addresses; pass recapture=fn, which "
                "captures them again."
            )
        if wanted <= have:
            raise RuntimeError(
                f"PagedStash.grow: the step demanded {demand} pages, with factor {self.factor} {wanted}, and the pool "
                f"has {have}; it need not grow."
            )
        if self._grows == MAX_GROWS:
            raise RuntimeError(
                f"PagedStash.grow: the pool has grown {MAX_GROWS} times and was too small again; pass device_pages."
            )
        old, self._grows = self._pool, self._grows + 1
        self._first_step = verdict.step + 1
        self.device_pages, self._sized = wanted, True
        self.step.end()
        self._make_pool()
        self.schedule.restart()
        self.step = Step(self, records=False)
        orders, self._orders = self._orders, weakref.WeakSet()
        try:
            if recapture is not None:
                recapture()
        finally:
            _invalidate(orders, "grow()")
            old.native.close()
        return wanted

    def register(self, *modules: torch.nn.Module) -> None:
        """Registers modules for rerun(), which restores their buffers and the state of delayed scaling, and checks
        their gradients. A step whose gate is up leaves their scales unchanged. Each reset() copies buffers and
        scales."""
        self._snapshot.register(*modules)

    def rerun(self, fn: Callable[[], object]) -> object:
        """Runs fn() as the last step once more: restores random states, and the buffers and scales of registered
        modules, from its reset(); after a replayed reset() random states continue. Zero the gradients first. Drops the
        verdict on the first run. Waits for the device.
        Errors: RuntimeError where a registered parameter has a gradient that is not zero.
        """
        self._check_open("rerun")
        self._snapshot.restore(self.device)
        if self._pool is not None:
            self._pool.report(self._mailbox.memory)
            self._mailbox.read()  # drops the verdict on the first run
        self._next_step()
        return fn()

    # ---- sizes ----

    def plan(self, worst: bool = False) -> Plan:
        """The memory of the groups of the last recorded step: the first one or that of reset(record=True), or the
        current one after its backward. worst: as if all rows were live; with its host_pages no group can overflow.
        Waits for the device. Errors: RuntimeError before a step was recorded."""
        self._check_open("plan")
        return Plan.of(*self._plan_inputs(), worst=worst)

    def plot(self, path: str) -> None:
        """Draws the pages in flight over the last recorded step; a path that ends with .csv gets a table."""
        self._check_open("plot")
        Plan.of(*self._plan_inputs()).plot(path)

    def close(self) -> Verdict | None:
        """Returns the verdict on the last step and frees device and pinned memory. Waits for the device. With
        "raise_at_step_end" it raises for a bad verdict."""
        if self._closed:
            return None
        verdict = self.verdict(wait=True)
        self.step.end()
        if self._pool is not None:
            self._pool.native.close()
        _invalidate(self._orders, "close()")
        self._pool, self._closed = None, True
        # Names may be layers that hold this stash: Python's collector does not see references held in C++.
        self.schedule, self.step = Schedule(), Step(self, records=False)
        self.sized, self._names, self._captured_names, self._unfinished = None, [], [], []
        if self.overflow == "raise_at_step_end":
            verdict.raise_if_bad()
        return verdict

    # ---- private ----

    def _wait_for_replays(self) -> None:
        """The current stream waits for the ends of replays: with `cuda_graph_event`, their copies come after it. Not
        in a capture, which no wait for work outside of it may enter."""
        for order in () if is_graph_capturing() or stream_captures() else self._orders:
            order.join()

    def _check_order(self, steps: list[Operation]) -> None:
        found = not_last_in(steps) if self.policy == "bump" else None
        if found is not None:
            raise ValueError(
                f"PagedStash: argument 'policy' is 'bump', but group {found.key[0]!r}, microbatch {found.key[1]}, "
                "is loaded before a group that was stored after it; 'bump' has no list of free pages and needs loads "
                "in the reverse order of stores. Use policy='ring'."
            )

    def _next_step(self, record: bool = False) -> bool:
        """Starts a step; returns whether it starts inside of a capture."""
        captured, last = stream_captures(), self.step
        if is_graph_capturing():
            self._captured_reset = True
        elif self._pool is not None and self._pool.captured:
            for order in self._orders:
                if captured:  # by the caller's own graph, whose replays begin steps
                    order.begins_itself = True
                else:
                    order.begin()
        last.end()
        recorded = last.records and (is_complete(last) or last.trace == self._unfinished)
        self._unfinished = list(last.trace) if last.records and not recorded else []
        if recorded and last.sizes:
            self.sized = last
            if self.low_water and not captured:
                self.recorded_pages = {key: size.pages(self.page_bytes) for key, size in last.sizes.items()}
        if self._pool is not None:
            self._pool.captured |= captured
            self._restore_scales()
            self._pool.reset(self._mailbox.memory)
        else:
            self._first_step += 1
            if recorded and last.sizes and not captured:
                self._make_pool()
        messages = [self.schedule.restart(bool(self._unfinished))]
        if last.any_group and not last.any_counted:
            messages.append(
                "PagedStash: the last step stashed nothing: no group saved a tensor whose live rows are known. Pass "
                "counts to the groups, or declare tensors with mark_pageable()."
            )
        if record:
            self.schedule = Schedule()
        self.step = Step(self, records=record or self._pool is None or bool(self._unfinished))
        self._names = self.step.names if captured else self._names_of(last)
        self._snapshot.save(self.device, captured)
        for text in filter(None, messages):
            warnings.warn(text, stacklevel=3)
        if recorded:
            self._check_order(operations_of(last))
        return captured

    def _names_of(self, step: Step) -> list[Hashable]:
        """The groups by the numbers of their stores. A step of replays has those of the captured step."""
        return step.names or self._captured_names

    def _plan_inputs(self) -> tuple[Step | None, int, int | None, float]:
        """Arguments of Plan.of()."""
        step = self.step if self.sized is None and self.step.records and is_complete(self.step) else self.sized
        return step, self.page_bytes, self.device_pages, self.factor

    def _own_gate(self) -> torch.Tensor:
        if self._gate is None:
            with torch.inference_mode(False):
                self._gate = torch.zeros((), device=self.device)
        return self._gate

    def _gate_of(self, source: object) -> torch.Tensor:
        """Memory for the gate together with that of a process group, or of a watch."""
        if source not in self._gates:
            with torch.inference_mode(False):
                self._gates[source] = torch.zeros((), device=self.device)
        return self._gates[source]

    def _restore_scales(self) -> None:
        """Restores the scales of the step's start where the gate is up by now."""
        self._snapshot.restore_scales(self._own_gate(), self._pool.join)

    def _make_pool(self) -> None:
        if stream_captures():
            raise RuntimeError(
                "PagedStash: the first use of the pool is inside of a CUDA graph's capture, where no memory can be "
                "allocated for it; run a step and reset() before the capture."
            )
        pages = self.device_pages
        if pages is None:
            plan = Plan.of(*self._plan_inputs())
            pages = plan.device_pages
            if plan.stashed_bytes >= plan.static_bytes:
                warnings.warn(
                    f"PagedStash: stashing costs memory here: {plan.static_bytes} bytes without it, "
                    f"{plan.stashed_bytes} with it (originals of two groups, and {pages} pages). It saves memory with "
                    "several groups, or with few live rows.",
                    stacklevel=4,
                )
        self._mailbox = Mailbox(self.device, _C.stash_report_bytes, _C.stash_report_in)  # pools count their own steps
        native = _C.StashPool(
            self.device,
            stream=self.streams.current(),
            page_bytes=self.page_bytes,
            device_pages=pages,
            host_pages=self.host_pages,
            policy=POLICIES[self.policy],
            sm_budget=self.sm_budget,
            trap=self.overflow == "trap",
            debug=self.debug,
            gate=self._own_gate(),
        )
        self._pool = _C.StashCalls(native, self.streams)


def _invalidate(orders: Iterable[ReplayOrder], call: str) -> None:
    for order in orders:
        order.invalid = f"its graphs hold pages that PagedStash.{call} has freed; capture again."


def _pass_begins() -> None:
    """Each pass is a step of the stashes that this thread has used."""
    for stash in _C.stashes_used():
        if stash.step.any_group:
            stash._next_step()
        stash._captured_reset = False


def _capture_ends() -> None:
    """A graph ends after its copies: a later graph on the stream comes after them."""
    for stash in _C.stashes_used():
        if stash._pool is not None and stash.step.any_group:
            stash._pool.join()


def _captured(order: ReplayOrder) -> None:
    for stash in _C.stashes_used():
        if len(stash.step.names):
            stash._pool.captured = True
            stash._orders.add(order)
            order.tie("PagedStash.reset()", begins_itself=stash._captured_reset)


observe_captures(Observer(_pass_begins, _capture_ends, _captured))
