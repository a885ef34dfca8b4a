# Pipelines of one rank over a stash: chunks of small layers that declare what they keep, run in any order of forwards
# and backwards, with what groups let go written over in between.
import torch

from transformer_engine.pytorch import saved as door

from .cases import Originals

ROWS, WIDTH = 32, 16  # 64 bytes a row: 4 rows a page


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(f"F{name}")
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(f"B{ctx.name}")
        return gradient * 1, None, None


def layer(x, stash, name, counter, log, scheduled=True):
    """sin of a tensor with `counter` live rows."""
    x = stash.pre_schedule(x) if stash and scheduled else x
    t = x * 1
    door.mark_pageable(t, counter)
    if stash is None:
        return Marked.apply(t.sin(), log, name)
    with stash.group(name):
        y = Marked.apply(t.sin(), log, name)
    del t
    return stash.post_schedule(y) if scheduled else y


def chunks_in_order(order, layers, counters, device, stash=None, log=None, scheduled=True, seed=0):
    """Gradients of a step: +c is a forward of chunk c, -c the backward of its oldest one, 0 drops the oldest of all."""
    log = [] if log is None else log
    generator = torch.Generator().manual_seed(seed)
    flying, leaves = [], []
    with Originals() as originals:
        for entry in order:
            if entry > 0:
                x = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()
                leaves.append(x)
                y = x * 1
                for i in range(layers):
                    y = layer(y, stash, (entry, i), counters[(entry - 1) * layers + i], log, scheduled)
                flying.append((entry, y))
                del y
            elif flying:
                at = 0 if entry == 0 else next(i for i, (c, _) in enumerate(flying) if c == -entry)
                _, y = flying.pop(at)
                if entry != 0:
                    y.sum().backward()
                del y
            if stash is not None:
                originals.overwrite()
    flying.clear()
    return [None if x.grad is None else x.grad[: int(min(map(int, counters)))] for x in leaves]


def one_f_one_b(stages, rank, microbatches):
    warm = min(stages - rank - 1, microbatches)
    return [1] * warm + [1, -1] * (microbatches - warm) + [-1] * warm


INTERLEAVED = [1, 1, 2, 2, 1, -2, 1, -2, 2, -1, 2, -1, -2, -2, -1, -1]
PIPELINES = {
    "one stage": ([1, -1] * 4, 3),
    **{f"1F1B rank {r}": (one_f_one_b(4, r, 8), 2) for r in range(4)},
    "interleaved": (INTERLEAVED, 2),
}
