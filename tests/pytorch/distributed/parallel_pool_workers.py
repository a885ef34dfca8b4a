# Pooled buffers of layers divided over ranks (ranks.py starts them). No test here: each worker returns what is wrong,
# as words, or what the tests compare.
import itertools
from typing import ClassVar

import torch
import torch.distributed as dist
from ranks import here, one_by_one

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import _C

from .parallel_cases import HIDDEN, WIDE
from .parallel_modules import RECIPES

TOKENS, BATCH = 64, 2  # of a rank: with block scaling a multiple of 128 rows


def pairs(layers, recompute=True, sequence=True, **options):
    torch.manual_seed(3)
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "device": here(), **options}
    column = {"parallel_mode": "column", "tp_recompute_allgather": recompute, **shared}
    return torch.nn.Sequential(
        *itertools.chain.from_iterable(
            (te.LayerNormLinear(HIDDEN, WIDE, **column), te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared))
            for _ in range(layers)
        )
    )


def mlps(layers, recompute=True, **options):
    torch.manual_seed(3)
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "device": here(), **options}
    return torch.nn.Sequential(
        *(
            te.LayerNormMLP(
                HIDDEN, WIDE, set_parallel_mode=True, activation="swiglu", tp_recompute_allgather=recompute, **shared
            )
            for _ in range(layers)
        )
    )


def drawn(rank, microbatches, tokens=TOKENS):
    torch.manual_seed(20 + rank)
    return [torch.randn(tokens, BATCH, HIDDEN).to(here()) for _ in range(microbatches)]


def interleaved(module, xs, recipe=None, at_once=True):
    """Layer by layer, one microbatch behind the other, the backwards in reverse; or, not at_once, each microbatch by
    itself. Outputs, gradients of inputs and of parameters."""
    module.zero_grad(set_to_none=True)
    leaves = [x.clone().requires_grad_() for x in xs]
    outputs = [None] * len(xs)
    for together in [range(len(xs))] if at_once else [[i] for i in reversed(range(len(xs)))]:
        results = {i: leaves[i] for i in together}
        for layer in module:
            for i in together:
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    results[i] = layer(results[i])
        for i in reversed(together):
            outputs[i] = results[i].detach()
            results[i].backward(torch.cos(outputs[i]))
    for layer in module:
        if layer.need_backward_dw():
            layer.backward_dw()
    return [*outputs, *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in module.parameters())]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def stacked(rank):
    """Three equal layers, two microbatches at work together: the bits of one at a time, and those of layers that keep
    what they gathered. Released memory is NaN."""
    wrong, before = [], _C.poison_comm_buffers(True)
    for (kind, recipe), delay in itertools.product(
        itertools.product((pairs, mlps), ("none", "current", "block", "current, dequantized", "block, high_precision")),
        (False, True),
    ):
        if delay and recipe not in ("none", "block"):
            continue
        options = {"delay_wgrad_compute": delay}
        xs, chosen = drawn(rank, 2), RECIPES[recipe]
        found = interleaved(kind(3, **options), xs, chosen)
        wrong += [f"{kind.__name__} {recipe} {delay}: NaN"] if not all(t.isfinite().all() for t in found) else []
        if not delay and not same(found, interleaved(kind(3), xs, chosen, at_once=False)):
            wrong.append(f"{kind.__name__} {recipe}: not the bits of one at a time")
        if not same(found, interleaved(kind(3, recompute=False, **options), xs, chosen)):
            wrong.append(f"{kind.__name__} {recipe} {delay}: not the bits of layers that keep")
    _C.poison_comm_buffers(before)
    return wrong


def usage():
    return te.distributed.comm_usage(dist.group.WORLD)


def sizes(rank):
    """(kind, recipe) -> bytes and slots after stacks of 2 and of 16 layers."""
    found = {}
    for (name, kind), recipe in itertools.product((("pairs", pairs), ("mlps", mlps)), ("none", "current", "block")):
        for layers in (2, 16):
            _C.release_comm_buffers()
            interleaved(kind(layers), drawn(rank, 2), RECIPES[recipe])
            found.setdefault((name, recipe), []).append(tuple(usage()))
    te.destroy_ub()
    found["let go"] = [tuple(usage())]
    return found


class Keeping(te.Float8CurrentScalingQuantizer):
    """A quantizer of the caller's that holds on to what it has seen."""

    seen: ClassVar[list] = []

    def quantize_impl(self, tensor):
        Keeping.seen.append((tensor, tensor.clone()))
        return super().quantize_impl(tensor)


def keeping(role):
    return Keeping(te.DType.kFloat8E4M3, here())


def held(rank):
    """A tensor that the caller still has a view of keeps its values: the next call uses another buffer, and NaN is
    written only into buffers without a view."""
    module, recipe, wrong = pairs(3), CustomRecipe(keeping), []
    for poison in (False, True):
        Keeping.seen.clear()
        before = _C.poison_comm_buffers(poison)
        for x in drawn(rank, 3):
            interleaved(module, [x], recipe)
        _C.poison_comm_buffers(before)
        gathered = [(t, copy) for t, copy in Keeping.seen if _C.is_pooled(t)]
        wrong += [] if gathered else [f"poison {poison}: no pooled buffer was seen"]
        if not all(torch.equal(t, copy) for t, copy in gathered):
            wrong.append(f"poison {poison}: what is held was overwritten")
        gathered.clear(), Keeping.seen.clear()
    return wrong


def planned(rank):
    """te.memory_plan shows the pooled buffers that exist, and the tensors that the backward gathers again besides those
    that are kept."""
    module, wrong = torch.nn.Sequential(*pairs(2), *mlps(1)), []
    (x,) = drawn(rank, 1)
    te.destroy_ub()
    interleaved(module, [x])
    plan = te.memory_plan(module, x)
    (arena,) = [row for row in plan.rows if row.status == "arena"]
    if arena.bytes != usage().bytes or f"buffers in use: {usage().slots}" != arena.name or not arena.bytes:
        wrong.append(f"{arena}, {usage()}")
    wrong += [] if f"arena {arena.bytes:,} B" in str(plan) else [str(plan)]
    whole = dist.get_world_size() * x.nbytes
    again = [row.bytes for row in plan.rows if row.status == "recomputed" and row.name == "gathered input"]
    wrong += [] if again == [whole] * 3 else [f"gathered again: {again}, {whole} each"]
    te.destroy_ub()
    local = te.memory_plan(te.Linear(HIDDEN, HIDDEN, device=here()), x)
    wrong += [f"{local}: an arena"] if local.bytes_of("arena") else []
    return wrong


class Middle(Exception):
    pass


def raised(rank):
    """An error in the middle of a step, on every rank, and a good step after it: no buffer is in use, and the bits are
    those of a module that never failed."""
    wrong, xs = [], drawn(rank, 2)

    def fail(*_):
        raise Middle

    for kind, recipe in itertools.product((pairs, mlps), ("none", "block", "delayed")):
        module, chosen = kind(3), RECIPES[recipe]
        if recipe != "delayed":  # its scales depend on all earlier steps
            for where in ("forward", "backward"):
                hooks = (fail, lambda t: t) if where == "forward" else (lambda t: t, fail)
                try:
                    with torch.autograd.graph.saved_tensors_hooks(*hooks):
                        interleaved(module, xs, chosen)
                    wrong.append(f"{kind.__name__} {recipe} {where}: nothing raised")
                except Middle:
                    pass
                if usage()[2]:
                    wrong.append(f"{kind.__name__} {recipe} {where}: {usage()} after an error")
        if not same(interleaved(module, xs, chosen), interleaved(kind(3), xs, chosen)):
            wrong.append(f"{kind.__name__} {recipe}: other bits after an error")
    return wrong


def peak(step):
    """The most bytes that the allocator had out at once in step(), beyond what was out before."""
    if here().type == "cuda":
        step()  # workspaces
        _C.release_comm_buffers()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events))


def peaks(rank):
    """layers -> the extra memory of keeping gathered tensors at the peak of a step of two microbatches, divided by the
    documented cost. On CUDA with more layers: the implementation decides whether one temporary gathered tensor counts
    at either peak."""
    found, ranks = {}, dist.get_world_size()
    for layers in (4, 16) if here().type == "cpu" else (32, 64):
        seen = {}
        for recompute in (True, False):
            module, xs = pairs(layers, recompute, bias=False), drawn(rank, 2, 512)
            for p in module.parameters():
                p.grad = torch.zeros_like(p)

            def step(module=module, xs=xs):
                results = [module(x.requires_grad_()) for x in xs]
                while results:
                    results.pop().sum().backward()

            _C.release_comm_buffers()
            seen[recompute] = peak(step)
        whole = ranks * xs[0].nbytes
        found[layers] = (seen[False] - seen[True]) / (len(xs) * layers * (ranks - 1) / ranks * whole)
    return found


def everything(rank):
    """One start of the ranks for all of them."""
    return one_by_one(rank, (stacked, sizes, held, planned, raised))
