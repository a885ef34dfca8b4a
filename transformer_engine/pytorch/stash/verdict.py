"""The verdict on a step: the flags of the device's report and their meaning."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import _C

# te_stash_flag, by bit
FLAGS = {
    1: "lost",
    2: "over capacity",
    4: "negative count",
    8: "out of order",
    16: "nothing stored",
    32: "bytes changed",
    64: "written between pages",
    128: "pages leaked",
}
_MEANINGS = {
    1: "there was no room for it, and its reload is NaN; make room with grow() or host_pages, then rerun() the step",
    2: "its count was above its rows and was cut; size its tensors for the routing, then rerun() the step",
    4: "its count was below 0 and was taken as 0; fix the kernel that writes the counter",
    8: "groups were loaded in another order than last in, first out, which 'bump' needs; use policy='ring'",
    16: "it was loaded while nothing of it was stored, or stored twice",
    32: "its pages changed between the store and the load: other code wrote there",
    64: "other code wrote between two pages",
    128: "pages were still taken when the step ended",
}


@dataclass(frozen=True)
class Verdict:
    """step: number of the step, from 0; reset(), grow() and rerun() each start one. ok: there are no flags. flags:
    names of the faults. group: name of the first group with a fault, None where it is unknown. report: the numbers
    (te_stash_report)."""

    step: int
    flags: tuple[str, ...]
    group: Hashable | None
    report: dict[str, int | float]

    @property
    def ok(self) -> bool:
        return not self.flags

    def __str__(self) -> str:
        if self.ok:
            return f"PagedStash: step {self.step} is good."
        meanings = "; ".join(text for bit, text in _MEANINGS.items() if FLAGS[bit] in self.flags)
        return f"PagedStash: step {self.step} is bad, first by group {self.group!r}: {meanings}."

    def raise_if_bad(self) -> None:
        if not self.ok:
            raise RuntimeError(str(self))


def verdict_of(report: dict[str, int | float], names: list[Hashable], first_step: int) -> Verdict:
    """names: of the groups of the step's stores, in order. first_step: number of the pool's first step."""
    bits, number = report["flags"], report["flagged_entry"]
    group = names[number] if 0 <= number < len(names) else None
    report = {**report, "step": first_step + report["step"]}
    return Verdict(report["step"], tuple(name for bit, name in FLAGS.items() if bits & bit), group, report)


def good_verdict(step: int) -> Verdict:
    """On a step without a pool, which keeps everything."""
    empty = _C.stash_report_in(torch.zeros(_C.stash_report_bytes, dtype=torch.uint8))
    return verdict_of({**empty, "flagged_entry": -1}, [], step)
