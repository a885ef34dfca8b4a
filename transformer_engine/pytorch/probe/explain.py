"""te.explain: the path that each op of a module takes, and why it does not take a faster one.

- It reports a run, and predicts nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.probe.one_run import recording, run_with_gradients, sample_for, table


@dataclass(frozen=True)
class Path:
    """calls: how often the op took this path, forward and backward together. why_not_faster: '' if no path is
    faster."""

    module: str
    op: str
    path: str
    why_not_faster: str
    calls: int


class Explanation:
    """rows: a Path for each module, op and path, in the order of the run."""

    def __init__(self, rows: list[Path]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        cells = [(r.module, r.op, r.calls, r.path, r.why_not_faster or "-") for r in self.rows]
        return table(("module", "op", "calls", "path", "why not faster"), cells)

    __repr__ = __str__


def explain(module: torch.nn.Module, *sample: object, **options: object) -> Explanation:
    """Runs module(*sample, **options) and its backward once and lists which path each op took.

    Without a sample, one of 16 tokens is made for modules of this library that have in_features or hidden_size. Paths
    depend on shapes, strides and alignment: pass a sample as in training. Gradients are discarded: .grad, main_grad,
    delayed weight gradients, buffers and random states are the same afterwards. Hooks on parameters and the sample do
    not run (except those of DistributedDataParallel with a reentrant checkpoint inside; no_sync() disables them).
    Errors: TypeError for a value other than a module, a module with a compiled part, or one whose input is unknown.
    """
    with recording("explain", module) as (record, _):
        if not (sample or options):
            sample = sample_for("explain", module)
        run_with_gradients(module, sample, options)
    counts = Counter(record.paths)
    rows = [Path(label, op.removeprefix("te::"), *rest, calls) for (label, op, *rest), calls in counts.items()]
    return Explanation(rows)
