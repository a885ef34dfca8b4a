"""The paged stash as users meet it. Copies are the pool's, what leaves and comes back when is the step's, the order in
which groups come by is the schedule's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import follow_captures, stream_captures
from transformer_engine.pytorch.stash.arguments import (
    check_counter,
    check_name,
    check_options,
    check_tail,
    check_tensors,
    checked_device,
)
from transformer_engine.pytorch.stash.explicit import keep_copies
from transformer_engine.pytorch.stash.plan import Plan, happened
from transformer_engine.pytorch.stash.pool import POLICIES, make_pool
from transformer_engine.pytorch.stash.rerun import Snapshot
from transformer_engine.pytorch.stash.schedule import Operation, Schedule, not_last_in, operations
from transformer_engine.pytorch.stash.step import Step, is_whole
from transformer_engine.pytorch.stash.verdict import Verdict, nothing_said, said
from transformer_engine.pytorch.verdict import Mailbox

MOST_GROWS = 8  # a pool that is still too small then is too small for another reason


class PagedStash(_C.StashCore):
    """Keeps the live rows of what layers save for backward in pages of one pool.

    page_bytes: a multiple of 128. device_pages: None sizes the pool by the counts of the first step, which keeps all
    tensors, times `factor`. host_pages: pinned ones, for what the device pages lack. policy: "ring", "stack", or
    "bump", where the schedule is first in, last out. overflow: a group without room is lost, its reload is NaN and the
    gate is raised; "spill" leaves it at that, "raise_at_step_end" raises as soon as a verdict has arrived, "trap" ends
    the process. sm_budget: blocks of a copy. low_water: where fewer device pages are free, the group whose backward is
    farthest moves to host pages. debug: canaries, checksums, leaks. device: where the tensors are.
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
        self._before = 0  # steps that came before the pool's
        self._gate: torch.Tensor | None = None
        self._gates: dict[object, torch.Tensor] = {}  # by group of ranks
        self._names: list[Hashable] = []  # of the step before
        self.recorded_pages: dict[Hashable, int] = {}  # of each group, where groups are evicted
        self._unfinished: list = []  # what the last step recorded, where it ended early
        self._grows = 0
        self._snapshot = Snapshot()

    def __deepcopy__(self, memo: dict) -> PagedStash:
        """Itself: a copied model shares it, as it shares its groups' steps."""
        return self

    # ---- groups ----

    def mark_pageable(self, tensor: torch.Tensor, counter: torch.Tensor, unit_rows: int = 1) -> None:
        """Only the first counter * unit_rows rows of `tensor` hold anything, whenever it is kept (saved/marks.py)."""
        _C.declare_rows(tensor, counter, unit_rows)

    def group(self, name: Hashable, counts: torch.Tensor | None = None, *, tail: str = "zero") -> _C.StashScope:
        """`with stash.group(name, counts):` around a layer: what is saved inside and says how many of its rows are
        alive is stashed together. counts: one integer on the device, the live rows of what our own modules keep there;
        other tensors say it by mark_pageable. tail: what a reload writes behind the live rows: "zero" (all of them),
        "tile" (to the next 128) or "keep" (nothing). Nothing happens where nothing is recorded for a backward.
        Errors: TypeError, ValueError for the arguments; RuntimeError, when entered, inside of another group.
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
                unit = min(int(unit_rows), 2**62)  # of no rows any is a multiple
                handle = _C.stash_tensors(self, group, *map(list, zip(*counted, strict=True)), unit, tail)
            if handle.state == "kept":
                keep_copies(handle, counted, unit_rows, tail)
        return handle

    def reload(self, handle: _C.StashHandle, keep: bool = False) -> list[torch.Tensor]:
        """The tensors of stash(), new ones: live rows, then the tail. keep: it can be asked for again; without, its
        pages go back.
        Errors: TypeError for what is no handle of stash(); RuntimeError where its pages are gone.
        """
        return _C.stash_reload(self, handle, keep)

    # ---- schedulers ----

    def pre_schedule(self, x: torch.Tensor) -> torch.Tensor:
        """x, before the layers of a group. Forward: what leaves has left, and its originals are freed. Backward, behind
        that of the layers: where a backward is next, its group starts to come back."""
        return _C.stash_pre(self, x)

    def post_schedule(self, y: torch.Tensor) -> torch.Tensor:
        """y, behind the layers of a group. Forward: the group leaves, unless its own backward is next; where another
        one's is, that one starts to come back. Backward, before that of the layers: what leaves has left, and this
        group is back. Errors: RuntimeError for an entry that the schedule does not have there."""
        return _C.stash_post(self, y)

    def schedule_from_order(self, order: Sequence[int | float], layers_per_chunk: int | Sequence[int] = 1) -> None:
        """The order of a step as make_graphed_callables takes it, instead of recording the first one: +c is a forward
        of chunk c, -c the backward of its oldest one. Groups take the places of a chunk's layers as they come by."""
        self._check_open("schedule_from_order")
        if self.schedule.position:
            raise RuntimeError("PagedStash.schedule_from_order: called within a step; call it behind reset().")
        schedule = Schedule(order, layers_per_chunk)
        self._check_order(operations(schedule.entries))
        self.schedule = schedule

    # ---- steps ----

    def reset(self, record: bool = False) -> None:
        """A step starts: every page is free, flags and gate are cleared, and the verdict on the last step is on its
        way. Call it before each step; a captured step captures it. record: this step's order and sizes are noted anew.
        Errors: RuntimeError for what a verdict told, under "raise_at_step_end"; the step has started all the same.
        Warns where the last step ended early, stashed nothing, or where stashing costs memory.
        """
        self._check_open("reset")
        captured = self._next_step(record)
        if self.overflow == "raise_at_step_end" and not captured and (verdict := self.verdict()) is not None:
            verdict.raise_if_bad()

    def verdict(self, wait: bool = False) -> Verdict | None:
        """On the last step whose report has arrived and was not read yet; None: there is none. It waits for nothing.
        wait: on the step that runs, for which the host waits; one that keeps everything, as the first does, is good."""
        self._check_open("verdict")
        if self._pool is None:
            return nothing_said(self._before) if wait else None
        if not wait:
            report = self._mailbox.read()
            return None if report is None else said(report, self._names, self._before)
        self._settle()
        self._pool.report(self._mailbox.memory)
        return said(self._mailbox.peek(), self.step.names, self._before)

    def gate(self, group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """float32 [] on the device: 1 where something of this step was lost or flagged, else 0. It is the `found_inf`
        that FusedAdam and torch's fused optimizers take (these want no dimension), which then apply nothing. One tensor
        for the stash's life, which may be asked for once. group: the largest of its ranks', by one all-reduce on the
        device, in a tensor of its own; every rank calls it in each step, those without groups too."""
        self._check_open("gate")
        if self._pool is not None:
            self._pool.join()
        gate = self._own_gate()
        if group is not None:
            own, gate = gate, self._gates.setdefault(group, torch.zeros_like(gate))
            gate.copy_(own)
            torch.distributed.all_reduce(gate, torch.distributed.ReduceOp.MAX, group=group)
        self._snapshot.settle(gate, None)
        return gate

    def grow(self, recapture: Callable[[], object] | None = None) -> int:
        """Behind a step: a pool of as many device pages as the step demanded, times `factor`; returns their number. The
        next step starts. recapture: captures anew what was captured with the old pool, whose graphs must not be
        replayed any more; without it a captured pool is refused. Waits for the device.
        Errors: RuntimeError for a captured pool, for one that is large enough, or behind eight of these calls.
        """
        self._check_open("grow")
        verdict = self.verdict(wait=True)
        have = 0 if self._pool is None else self._pool.native.device_pages
        demand = verdict.report["demand"]
        wanted = -int(-demand * self.factor // 1)
        if self._captured and recapture is None:
            raise RuntimeError(
                "PagedStash.grow: graphs were captured with this pool and hold its addresses; pass recapture=fn, which "
                "captures them anew."
            )
        if wanted <= have:
            raise RuntimeError(
                f"PagedStash.grow: the step demanded {demand} pages, times {self.factor} {wanted}; the pool has {have}."
            )
        if self._grows == MOST_GROWS:
            raise RuntimeError(f"PagedStash.grow: the pool has grown {MOST_GROWS} times, and was too small again.")
        old, self._grows, self._captured = self._pool, self._grows + 1, False
        self._before = verdict.step + 1
        self.device_pages, self._sized = wanted, True
        self.step.over()
        self._make_pool()
        self.schedule.restart()
        self.step = Step(self, records=False)
        if recapture is not None:
            recapture()
        old.native.close()
        return wanted

    def register(self, *modules: torch.nn.Module) -> None:
        """Modules whose buffers, and scales and histories of delayed scaling, rerun() puts back, and whose gradients it
        looks at; a step whose gate is up leaves their scales as they were. These and buffers are copied at each
        reset()."""
        self._snapshot.register(*modules)

    def rerun(self, fn: Callable[[], object]) -> object:
        """fn() as the step that just ran, again: random states, and buffers and scales of registered modules, are as
        they were at its reset(); where that was replayed, random states go on. Gradients are to be zeroed, as they were
        when the step started. Its verdict is not told again. Waits for the device.
        Errors: RuntimeError where a registered parameter has a gradient that is not zero.
        """
        self._check_open("rerun")
        self._snapshot.put_back(self.device)
        if self._pool is not None:
            self._pool.report(self._mailbox.memory)
            self._mailbox.read()  # the verdict on the bad step is why it runs again
        self._next_step()
        return fn()

    # ---- sizes ----

    def plan(self, worst: bool = False) -> Plan:
        """Memory of the groups of the last recorded step (the first one, or that of reset(record=True)), or of the one
        that runs, behind its backward. worst: as if all rows were alive; its host_pages make an overflow impossible.
        Waits for the device. Errors: RuntimeError before a step was recorded."""
        self._check_open("plan")
        return Plan.of(*self._sizes(), worst=worst)

    def plot(self, path: str) -> None:
        """Pages in flight over the entries of the last recorded step: a picture, or for .csv a table."""
        self._check_open("plot")
        Plan.of(*self._sizes()).plot(path)

    def close(self) -> Verdict | None:
        """The verdict on the last step; device and pinned memory are given back. Waits for the device. Under
        "raise_at_step_end" it raises what the verdict tells."""
        if self._closed:
            return None
        verdict = self.verdict(wait=True)
        self.step.over()
        if self._pool is not None:
            self._pool.native.close()
        self._pool, self._closed = None, True
        # Names may be the layers themselves, which hold this stash: what C++ holds, Python's collector does not see.
        self.schedule, self.step = Schedule(), Step(self, records=False)
        self.sized, self._names, self._unfinished = None, [], []
        if self.overflow == "raise_at_step_end":
            verdict.raise_if_bad()
        return verdict

    # ---- inside ----

    def _check_order(self, steps: list[Operation]) -> None:
        found = not_last_in(steps) if self.policy == "bump" else None
        if found is not None:
            raise ValueError(
                f"PagedStash: argument 'policy' is 'bump', but group {found.key[0]!r}, microbatch {found.key[1]}, "
                "comes back while one that was stored behind it is away; 'bump' has no list of pages, and wants the "
                "last one first. Use policy='ring'."
            )

    def _next_step(self, record: bool = False) -> bool:
        """Whether it starts inside of a capture."""
        captured, last = stream_captures(), self.step
        last.over()
        recorded = last.records and (is_whole(last) or last.trace == self._unfinished)
        self._unfinished = list(last.trace) if last.records and not recorded else []
        if recorded and last.sizes:
            self.sized = last
            if self.low_water and not captured:
                self.recorded_pages = {key: size.pages(self.page_bytes) for key, size in last.sizes.items()}
        if self._pool is not None:
            self._captured |= captured
            self._settle()
            self._pool.reset(self._mailbox.memory)
        else:
            self._before += 1
            if recorded and last.sizes and not captured:
                self._make_pool()
        told = [self.schedule.restart(bool(self._unfinished))]
        if last.passed and not last.counted:
            told.append(
                "PagedStash: the last step stashed nothing: no group saved a tensor that says how many of its rows are "
                "alive. Give the groups counts, or declare tensors (mark_pageable)."
            )
        if record:
            self.schedule = Schedule()
        self.step = Step(self, records=record or self._pool is None or bool(self._unfinished))
        self._names = self.step.names if captured else last.names  # replays report of the step that is captured
        self._snapshot.take(self.device, captured)
        for text in filter(None, told):
            warnings.warn(text, stacklevel=3)
        if recorded:
            self._check_order(happened(last))
        return captured

    def _sizes(self) -> tuple[Step | None, int, int | None, float]:
        """What a plan is made of."""
        step = self.step if self.sized is None and self.step.records and is_whole(self.step) else self.sized
        return step, self.page_bytes, self.device_pages, self.factor

    def _own_gate(self) -> torch.Tensor:
        if self._gate is None:
            with torch.inference_mode(False):
                self._gate = torch.zeros((), device=self.device)
        return self._gate

    def _settle(self) -> None:
        """What a bad step leaves is taken back, as far as the gate knows now."""
        self._snapshot.settle(self._own_gate(), self._pool.join)

    def _make_pool(self) -> None:
        if stream_captures():
            raise RuntimeError(
                "PagedStash: the pool would be made inside of a CUDA graph's capture; run a step, and reset(), outside "
                "of it first."
            )
        pages = self.device_pages
        if pages is None:
            plan = Plan.of(*self._sizes())
            pages = plan.device_pages
            if plan.stashed_bytes >= plan.static_bytes:
                warnings.warn(
                    f"PagedStash: stashing costs memory here: {plan.static_bytes} bytes are kept without it, "
                    f"{plan.stashed_bytes} with it (two groups' originals and {pages} pages). It saves where there are "
                    "several groups, or few of their rows are alive.",
                    stacklevel=4,
                )
        self._mailbox = Mailbox(self.device, _C.stash_report_bytes, _C.stash_report_in)  # pools count their own steps
        self._pool = make_pool(
            self.device,
            self.lanes,
            page_bytes=self.page_bytes,
            device_pages=pages,
            host_pages=self.host_pages,
            policy=POLICIES[self.policy],
            sm_budget=self.sm_budget,
            trap=self.overflow == "trap",
            debug=self.debug,
            gate=self._own_gate(),
        )


def _pass_ended() -> None:
    """A pass of a warm-up is a step of the stashes that it went through."""
    for stash in _C.stashes_used():
        if stash.step.passed:
            stash._next_step()


def _capture_ends() -> None:
    for stash in _C.stashes_used():
        if stash._pool is not None and stash.step.passed:
            stash._pool.end_capture()


follow_captures(_pass_ended, _capture_ends)
