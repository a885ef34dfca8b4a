# The functions that the tests of captured callables run on each of several ranks (ranks.py starts them), beside eager
# twins. No test is here.
import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from .program_runs import run
from .programs import generated

HIDDEN, RECIPE, BF16 = 32, DelayedScaling(amax_history_len=2), torch.bfloat16


class Backwards(torch.nn.Module):
    """Its modules run in another order than they are registered in; the last is as wide as the first two."""

    def __init__(self):
        super().__init__()
        self.wide = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, params_dtype=BF16, device=here())
        self.narrow = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=here())

    def forward(self, x):
        return self.wide(self.narrow(x))


class Within(torch.nn.Module):
    """Contains an autocast with a group."""

    def __init__(self, group):
        super().__init__()
        self.inner, self.group = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=here()), group

    def forward(self, x):
        with around(self.group):
            return self.inner(x)


def around(group):
    return te.autocast(enabled=True, recipe=RECIPE, amax_reduction_group=group)


def samples(count=1):
    return tuple((torch.zeros(8, HIDDEN, dtype=BF16, requires_grad=True, device=here()),) for _ in range(count))


def step(call, x, rank, context, way):
    x = x.clone().requires_grad_()
    with context:
        y = way(call, x)
    y.backward(torch.full_like(y, 1.0 + rank))


def states(module):
    found = [part.fp8_meta for part in module.modules() if hasattr(part, "fp8_meta")]
    return [meta[key].scale.tolist() for meta in found for key in ("scaling_fwd", "scaling_bwd")]


def inputs(rank, seed):
    torch.manual_seed(10 * seed + rank)
    return (torch.randn(8, HIDDEN) * (1 + 3 * rank)).to(here(), BF16)


def plainly(call, x):
    return call(x)


def groups_of_autocast(rank):
    """name -> (scales of captured, scales of eager), after each of three steps."""
    groups = {"default": None, "world": dist.group.WORLD, "own": [dist.new_group([r]) for r in range(2)][rank]}
    found = {}
    for captured in groups:
        for name in ("default", "world", "own", "none", "disabled"):
            for way in (plainly, te.checkpoint):
                module = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=here())
                eager = copy.deepcopy(module)
                options = {"enabled": True, "recipe": RECIPE, "amax_reduction_group": groups[captured]}
                te.make_graphed_callables(module, *samples(), **options)
                left = []
                for seed in range(3):
                    x = inputs(rank, seed)
                    outside = {"none": nullcontext(), "disabled": te.autocast(enabled=False)}
                    context = outside.get(name) or around(groups[name])
                    step(module, x, rank, context, way)
                    step(eager, x, rank, around(groups.get(name, groups[captured])), way)
                    left.append((states(module), states(eager)))
                found[f"{captured}, then {name}, {way.__name__}"] = left
    return found


def groups_inside(rank):
    """An autocast inside of a captured callable keeps its group, whatever surrounds it; in one region each module has
    the group of its first call."""
    own = [dist.new_group([r]) for r in range(2)][rank]
    found = {}
    for inner, outer in ((own, None), (None, own)):
        module, eager = Within(inner), Within(inner)
        eager.load_state_dict(module.state_dict())
        te.make_graphed_callables(module, *samples())
        left = []
        for seed in range(3):
            x = inputs(rank, seed)
            for m in (module, eager):
                step(m, x, rank, around(outer), plainly)
            left.append((states(module), states(eager)))
        found[f"inner is own: {inner is own}"] = left
    module = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=here())
    eager, left = copy.deepcopy(module), []
    graphed = te.make_graphed_callables((module,), samples(2), enabled=True, recipe=RECIPE, _order=[1, 1, -1, -1])
    for seed in range(3):
        x = inputs(rank, seed)
        for calls in (graphed, (eager, eager)):
            with around(own):
                first = calls[0](x.clone().requires_grad_())
                with around(None):
                    second = calls[1](3 * x.clone().requires_grad_())
            for y in (first, second):
                y.backward(torch.full_like(y, 1.0 + rank))
        left.append((states(module), states(eager)))
    found["two in one region"] = left
    return found


def captured_on_one_rank(rank):
    """Both ranks reduce at the same places in the same order, although one of them replays."""
    module = Backwards()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape).to(p))
    eager = copy.deepcopy(module)
    if rank == 0:
        te.make_graphed_callables(module, *samples(), enabled=True, recipe=RECIPE)
    left = []
    for seed in range(3):
        x = inputs(rank, seed)
        for m in (module, eager):
            step(m, x, rank, around(None), plainly)
        left.append((states(module), states(eager)))
    return left


def uneven_calls(rank):
    """One rank replays more often, over a separate group: no rank waits for the other."""
    own = [dist.new_group([r]) for r in range(2)][rank]
    module = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=here())
    te.make_graphed_callables(module, *samples(), enabled=True, recipe=RECIPE)
    for seed in range(1 + 2 * rank):
        for way in (plainly, te.checkpoint):
            step(module, inputs(rank, seed), rank, around(own), way)
    return states(module)


def generated_programs(rank, seeds):
    """seed -> the errors of that program. Amaxes are reduced over the world or over a group of one, that of the
    autocast around, which the capture may get too."""
    groups = [dist.group.WORLD, [dist.new_group([r]) for r in range(2)][rank]]
    found = {}
    for seed in seeds:
        program = generated(seed, group=True)
        try:
            run(program, "cpu", group=groups[seed // 2 % 2], rank=rank)
        except Exception as error:
            found[seed] = f"{type(error).__name__}: {error}\n{program}"
    return found
