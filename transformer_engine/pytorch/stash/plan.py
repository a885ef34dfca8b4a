"""The sizes of a recorded step's groups, and its plan: memory with everything kept, memory with the stash, and pages in
flight."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.schedule import Entry, Operation, operations
from transformer_engine.pytorch.stash.segments import Segment

ALIGNMENT = 128  # of each region in the stream of bytes that is cut into pages (transformer_engine/stash.h)

# From one reset() to the next (csrc/stash/stash_step.h). trace: entries of groups between schedulers, operations of
# others; sizes: of groups, by their keys; names: of the group of each store.
Step = _C.StashStep


# ---- sizes ----


class RegionSize(NamedTuple):
    """One region: `repeats` times at most `most` units of unit_bytes; count: a copy of the counter, on the device;
    trailing: units after the live ones that are copied too."""

    unit_bytes: int
    most: int
    count: torch.Tensor
    trailing: int
    repeats: int

    def bytes(self, worst: bool) -> int:
        """Of one repeat."""
        live = self.most if worst else int(self.count)
        return self.unit_bytes * (min(live + self.trailing, self.most) if live > 0 else 0)


class Size(NamedTuple):
    """static: bytes of the storages that the group frees."""

    static: int
    regions: list[RegionSize]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Size:
        """Reads no counter: live() and pages() do."""
        regions = [
            RegionSize(r.row_bytes * r.unit_rows, r.rows // r.unit_rows, r.counter.clone(), r.trailing_units, r.repeats)
            for segment in segments
            for r in segment.regions
        ]
        return cls(sum(segment.bytes for segment in segments), regions)

    def live(self, worst: bool = False) -> int:
        return sum(region.bytes(worst) * region.repeats for region in self.regions)

    def pages(self, page_bytes: int, worst: bool = False) -> int:
        stream = sum(-(-region.bytes(worst) // ALIGNMENT) * ALIGNMENT * region.repeats for region in self.regions)
        return -(-stream // page_bytes)


# ---- recorded steps ----


def is_complete(step: Step) -> bool:
    """Whether every group that was stored was loaded."""
    away = set()
    for e in step.trace:
        store, key = (e.store, e.key) if isinstance(e, Operation) else (e.forward, e[1:])
        (away.add if store else away.discard)(key)
    return not away


def operations_of(step: Step) -> list[Operation]:
    """Stores and loads in the order of later steps, which know the schedule."""
    entries = [e for e in step.trace if isinstance(e, Entry)]
    if len(entries) == len(step.trace):
        return operations(entries)
    return [e for e in step.trace if isinstance(e, Operation)] if not entries else _lifetimes(step.trace)


def _lifetimes(trace: list[Entry | Operation]) -> list[Operation]:
    """Each group from its forward to its backward, stored or not."""
    return [e if isinstance(e, Operation) else Operation(e.forward, e[1:]) for e in trace]


def _evict_farthest(step: Step, pool: _C.StashCalls) -> None:
    """Evicts groups, the one with the latest backward first, until `low_water` device pages are free by the recorded
    counts. The device, which has the real counts, skips evictions that are not needed."""
    pages, low = step.stash.recorded_pages, step.stash.low_water
    away = {h.key: h for h in step.scheduled if h.state in ("stored", "away") and not h.evicted}
    free = pool.native.device_pages - sum(pages.get(key, 0) for key in away)
    for entry in reversed(step.stash.schedule.ahead()):
        if free >= low:
            return
        handle = None if entry.forward else away.get(entry[1:])
        if handle is not None:
            handle.evict(low)
            free += pages.get(handle.key, 0)


def _stop_endless_recording(step: Step) -> None:
    """Without a reset() the records would grow with every microbatch."""
    step.forget_records()
    schedule = step.stash.schedule
    if not schedule.known:
        schedule.entries, schedule.endless = [], True
    warnings.warn(
        "PagedStash: one step had more than 1,000 microbatches of one group. Without reset() the first step never "
        "ends, so that everything is kept unless device_pages is given, and no schedule is known. The records of "
        "this step are dropped; call reset() before each step.",
        stacklevel=3,
    )


_C.set_stash_python(Entry, Operation, Size.of, _evict_farthest, _stop_endless_recording)


# ---- plans ----


@dataclass(frozen=True)
class Plan:
    """Bytes at the peak of the step. static: originals of all groups. live: their live rows. stashed: the device pool,
    and the originals of the two largest groups that follow each other (one computes while the other is stored).
    peak_pages: most pages in flight; device_pages, host_pages: the pages that hold them."""

    static_bytes: int
    live_bytes: int
    stashed_bytes: int
    page_bytes: int
    peak_pages: int
    device_pages: int
    host_pages: int
    occupancy: list[tuple[str, Hashable, int]] = field(repr=False)

    @classmethod
    def of(
        cls, step: Step | None, page_bytes: int, device_pages: int | None, factor: float, *, worst: bool = False
    ) -> Plan:
        """step: the last recorded one. device_pages: of the pool, None where its size is not known yet."""
        if step is None or not step.sizes:
            raise RuntimeError(
                "PagedStash.plan: no step with groups was recorded yet; run one between two calls of reset(), the "
                "first of them reset(record=True) unless it is the first step."
            )
        steps = operations_of(step)
        pages = {key: size.pages(page_bytes, worst) for key, size in step.sizes.items()}
        now = peak = 0
        occupancy = []
        for operation in steps:
            now += pages.get(operation.key, 0) if operation.store else -pages.get(operation.key, 0)
            peak = max(peak, now)
            occupancy.append(("store" if operation.store else "load", operation.key, now))
        device = device_pages if worst and device_pages is not None else None
        if device is None:
            device = -int(-peak * factor // 1) if not worst else peak
        originals = [step.sizes[o.key].static for o in steps if o.store and o.key in step.sizes]
        two_largest = max((a + b for a, b in pairwise(originals)), default=sum(originals))
        return cls(
            static_bytes=_peak(_lifetimes(step.trace), step.sizes, lambda size: size.static),
            live_bytes=_peak(steps, step.sizes, lambda size: size.live(worst)),
            stashed_bytes=device * page_bytes + two_largest,
            page_bytes=page_bytes,
            peak_pages=peak,
            device_pages=device,
            host_pages=max(0, peak - device),
            occupancy=occupancy,
        )

    def plot(self, path: str) -> None:
        """Pages in flight after each store and load: a picture, or a table where the path ends with .csv."""
        if str(path).endswith(".csv"):
            with open(path, "w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("operation", "group", "microbatch", "pages in flight"))
                rows.writerows((kind, key[0], key[1], now) for kind, key, now in self.occupancy)
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("PagedStash.plot: pictures need matplotlib; install it, or pass a .csv path.") from error
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.subplots()
        axes.step(range(len(self.occupancy)), [now for _, _, now in self.occupancy], where="post", label="in flight")
        axes.axhline(self.device_pages, linestyle="--", label=f"{self.device_pages} device pages", color="tab:orange")
        axes.set_title("Pages in flight after each store and load")
        axes.set(xlabel="stores and loads", ylabel=f"pages of {self.page_bytes:,} B", ylim=(0, None))
        axes.legend()
        figure.savefig(path)


def _peak(steps: list[Operation], sizes: dict[Hashable, Size], of) -> int:
    now = peak = 0
    for operation in steps:
        size = sizes.get(operation.key)
        if size is not None:
            now += of(size) if operation.store else -of(size)
            peak = max(peak, now)
    return peak
