# Captured layers over channels to peers beside eager ones, on each of several ranks (ranks.py starts them). No test
# here: a worker returns what differs, as words.
import copy
import itertools

import torch
from ranks import here, on_cuda

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .captured_step import captured_step
from .parallel_modules import RECIPES
from .peer_workers import different, example, made, step

TOKENS = 600 if on_cuda() else 32  # on CUDA enough for runs


def callables(rank):
    """te.make_graphed_callables: replays on new values, eager calls of another layer over the same channel between."""
    wrong = []
    before = _C.set_cpu_products("loop")
    # The ranks agree on a per-tensor scale over the group, which is gloo for ranks on one CUDA device: not captured.
    recipes = ("none", "current", "block") if here().type == "cpu" else ("none", "block")
    for kind, recipe in itertools.product(("norm", "row", "mlp"), recipes):
        dtype = torch.bfloat16
        module = made(kind, "chunked", dtype)
        eager, between = copy.deepcopy(module), copy.deepcopy(module)
        options = {} if recipe == "none" else {"enabled": True, "recipe": RECIPES[recipe]}
        x = example(kind, rank, dtype, TOKENS)
        step(between, x, RECIPES[recipe])
        te.make_graphed_callables(module, (torch.zeros_like(x, requires_grad=True),), **options)
        for number in range(4):
            x = example(kind, rank, dtype, TOKENS, number)
            got = {name: t.clone() for name, t in step(module, x, RECIPES[recipe]).items()}
            step(between, example(kind, rank, dtype, TOKENS // 2 if number % 2 else TOKENS, 50), RECIPES[recipe])
            wanted = step(eager, x, RECIPES[recipe])
            wrong += different(f"{kind} {recipe} {number}", got, wanted)
    _C.set_cpu_products(before)
    return wrong


def whole_steps(rank, replays=500):
    """A forward and backward in one graph of torch's, replayed on changing values with eager calls between: bits as of
    eager steps, and no memory more."""
    wrong = []
    for kind in ("mlp", "row"):
        dtype = torch.bfloat16
        module = made(kind, "chunked", dtype)
        eager = copy.deepcopy(module)
        inputs = [example(kind, rank, dtype, TOKENS, again) for again in range(5)]
        wanted = [step(eager, x) for x in inputs]
        x = inputs[0].clone().requires_grad_()
        dy = torch.cos(wanted[0]["y"])
        graph, found = captured_step(module, x, dy)
        bad = torch.zeros(len(found), dtype=torch.int64, device=x.device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), te.distributed.comm_usage()
        for number in range(replays):
            which = number % len(inputs)
            with torch.no_grad():
                x.copy_(inputs[which])
                dy.copy_(torch.cos(wanted[which]["y"]))
            for t in found.values():
                t.zero_()
            graph.replay()
            for i, (name, t) in enumerate(found.items()):
                bad[i] += (t != wanted[which][name]).sum()
            if number % 5 == 0:
                step(eager, inputs[(which + 1) % len(inputs)])
        torch.cuda.synchronize()
        wrong += [f"{kind}: {name} {int(n)}" for name, n in zip(found, bad) if n]
        after = torch.cuda.memory_allocated(), te.distributed.comm_usage()
        eager.zero_grad(set_to_none=True)
        if after[1] != before[1] or after[0] > before[0] + (1 << 22):
            wrong.append(f"{kind}: memory {before} -> {after}")
    return wrong
