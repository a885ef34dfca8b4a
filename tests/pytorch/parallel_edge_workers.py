# Edges of tensor parallelism, on each of several ranks (ranks.py starts them): ranks that disagree, and shapes and
# options that meet seldom. No test here: a worker returns what it found.
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling, "delayed": DelayedScaling, "none": None}


def column(**options):
    shared = {"sequence_parallel": True, "tp_group": dist.group.WORLD, "device": "cpu"}
    return te.Linear(32, 32, parallel_mode="column", **{**shared, **options})


def call(module, recipe="none", rows=128):
    chosen = RECIPES[recipe]
    with te.autocast(enabled=chosen is not None, recipe=chosen and chosen()):
        return module(torch.randn(rows, 32, requires_grad=True))


def said(what):
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagreeing(rank):
    """What each rank hears where they quantize differently, or one gathers in a backward and the other in a forward;
    and whether the next call works."""
    found = []
    for recipes in (("none", "current"), ("delayed", "current"), ("block", "current"), ("current", "none")):
        module = column()
        words = said(lambda module=module, recipes=recipes: call(module, recipes[rank]))
        found.append((recipes, words, call(module).shape == (256, 16)))
    module = column(bias=False)
    y, other = call(module), column()
    frozen = column(bias=False)
    frozen.weight.requires_grad_(False)
    y = call(module if rank == 0 else frozen)

    def backward():
        y.sum().backward()
        if rank == 1:  # whose backward had nothing to gather: it goes on with the next layer
            call(other)

    found.append(("backward", said(backward), call(other).shape == (256, 16)))
    return found
