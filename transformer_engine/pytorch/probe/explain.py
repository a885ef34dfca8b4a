"""te.explain: the path that each op of a module takes, and why not a faster one. It reports what a run did; it predicts
nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.probe.one_run import recording, run_with_gradients, sample_for, table


@dataclass(frozen=True)
class Path:
    """calls: how often the op took this path, forward and backward together. why_not_faster: '' where nothing is."""

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

    Without a sample, one of 16 tokens is made for our modules that have in_features or hidden_size. Paths depend on
    shapes, strides and alignment: pass what you train with. Gradients go nowhere: .grad, main_grad, what waits for
    backward_dw(), buffers and the random states are as before afterwards; hooks on parameters and the sample do not
    run (but for DistributedDataParallel's, where a reentrant checkpoint is inside: no_sync() quiets them).
    Errors: TypeError for something that is not a module, has a compiled part, or whose input is not known.
    """
    with recording("explain", module) as (record, _):
        if not (sample or options):
            sample = sample_for("explain", module)
        run_with_gradients(module, sample, options)
    counts = Counter(record.paths)
    rows = [Path(label, op.removeprefix("te::"), *rest, calls) for (label, op, *rest), calls in counts.items()]
    return Explanation(rows)
