"""Memory of a recorded step's groups: with everything kept, and stashed. And the pages in flight, drawn."""

from __future__ import annotations

import csv
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from transformer_engine.pytorch.stash.schedule import Entry, Operation, operations
from transformer_engine.pytorch.stash.sizes import Size
from transformer_engine.pytorch.stash.step import Step


@dataclass(frozen=True)
class Plan:
    """Bytes at the peak of the step. static: all groups' originals. live: their live rows. stashed: the device pool,
    and the originals of the two largest groups that follow each other (one computes while the other leaves).
    peak_pages: most pages in flight; device_pages, host_pages: those that hold them."""

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
        """step: the last one that was recorded. device_pages: of the pool, None where its size is not known yet."""
        if step is None or not step.sizes:
            raise RuntimeError(
                "PagedStash.plan: no step with groups was recorded yet; run one between two reset()s, the first of "
                "them reset(record=True) where it is not the first step."
            )
        steps = happened(step)
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
        two = max((a + b for a, b in pairwise(originals)), default=sum(originals))
        return cls(
            static_bytes=_most(_mixed(step.trace), step.sizes, lambda size: size.static),
            live_bytes=_most(steps, step.sizes, lambda size: size.live(worst)),
            stashed_bytes=device * page_bytes + two,
            page_bytes=page_bytes,
            peak_pages=peak,
            device_pages=device,
            host_pages=max(0, peak - device),
            occupancy=occupancy,
        )

    def plot(self, path: str) -> None:
        """Pages in flight behind each store and load: a picture, or for .csv a table."""
        if str(path).endswith(".csv"):
            with open(path, "w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(("operation", "group", "microbatch", "pages in flight"))
                rows.writerows((kind, key[0], key[1], now) for kind, key, now in self.occupancy)
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("PagedStash.plot: pictures need matplotlib; install it, or ask for a .csv.") from error
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.subplots()
        axes.step(range(len(self.occupancy)), [now for _, _, now in self.occupancy], where="post", label="in flight")
        axes.axhline(self.device_pages, linestyle="--", label=f"{self.device_pages} device pages", color="tab:orange")
        axes.set_title("Pages in flight behind each store and load")
        axes.set(xlabel="stores and loads", ylabel=f"pages of {self.page_bytes:,} B", ylim=(0, None))
        axes.legend()
        figure.savefig(path)


def happened(step: Step) -> list[Operation]:
    """Stores and loads as they come with the schedule known; entries of schedulers and operations of others."""
    entries = [e for e in step.trace if isinstance(e, Entry)]
    if len(entries) == len(step.trace):
        return operations(entries)
    return [e for e in step.trace if isinstance(e, Operation)] if not entries else _mixed(step.trace)


def _mixed(trace: list[Entry | Operation]) -> list[Operation]:
    """Each group from its forward to its backward, whether it leaves in between or not."""
    return [e if isinstance(e, Operation) else Operation(e.forward, e[1:]) for e in trace]


def _most(steps: list[Operation], sizes: dict[Hashable, Size], of) -> int:
    now = peak = 0
    for operation in steps:
        size = sizes.get(operation.key)
        if size is not None:
            now += of(size) if operation.store else -of(size)
            peak = max(peak, now)
    return peak
