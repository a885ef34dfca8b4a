"""What a report of the device says of a step, in words."""

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
_MEANS = {
    1: "there was no room for it, and its reload is NaN; grow() or more host pages make room, rerun() repeats the step",
    2: "its count was above its rows, and was cut; size its tensors for the routing, then rerun() the step",
    4: "its count was below 0, and was taken for 0; mend who writes the counter",
    8: "groups came back in another order than last in, first out, which 'bump' needs; use policy='ring'",
    16: "it was loaded while nothing of it was stored, or stored twice",
    32: "its pages were not what was stored when it came back: somebody wrote there",
    64: "somebody wrote between two pages",
    128: "pages were taken still when the step ended",
}


@dataclass(frozen=True)
class Verdict:
    """step: how many steps came before it: reset(), grow() and rerun() begin one each. ok: nothing is flagged. flags:
    what is. group: of the first group that was flagged, None where it is unknown. report: the numbers
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
        means = "; ".join(text for bit, text in _MEANS.items() if FLAGS[bit] in self.flags)
        return f"PagedStash: step {self.step} is bad, first by group {self.group!r}: {means}."

    def raise_if_bad(self) -> None:
        if not self.ok:
            raise RuntimeError(str(self))


def said(report: dict[str, int | float], names: list[Hashable], before: int) -> Verdict:
    """names: of the step's stores, by number. before: steps before the pool's first one."""
    bits, number = report["flags"], report["flagged_entry"]
    group = names[number] if 0 <= number < len(names) else None
    report = {**report, "step": before + report["step"]}
    return Verdict(report["step"], tuple(name for bit, name in FLAGS.items() if bits & bit), group, report)


def nothing_said(step: int) -> Verdict:
    """On a step without a pool, in which nothing can be lost."""
    empty = _C.stash_report_in(torch.zeros(_C.stash_report_bytes, dtype=torch.uint8))
    return said({**empty, "flagged_entry": -1}, [], step)
