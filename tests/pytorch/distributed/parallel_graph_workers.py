# The worker functions of test_parallel_graph.py: captured divided layers, compared with eager copies, on each of
# several ranks (ranks.py starts them). No test here: a worker returns what differs, as words.
import copy
import itertools

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te

from .captured_step import captured_step
from .parallel_cases import HIDDEN, WIDE
from .parallel_modules import BATCH, RECIPES, TOKENS

STEPS = 3


def pair(sequence, recompute):
    """A column layer and a row layer after it."""
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "device": here()}
    shared["params_dtype"] = torch.bfloat16
    keep = {"tp_recompute_allgather": recompute}
    return torch.nn.Sequential(
        te.LayerNormLinear(HIDDEN, WIDE, parallel_mode="column", **keep, **shared),
        te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared),
    )


def drawn():
    return torch.randn(TOKENS, BATCH, HIDDEN).to(here(), torch.bfloat16)


def step(call, module, x, dy, around):
    """Output and gradients, in memory of their own: what a graph writes is written again by the next replay."""
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    with around():
        y = call(leaf)
    y.backward(dy)
    found = {"y": y.detach(), "dx": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return {name: t.clone() for name, t in found.items()}


def differences(captured, eager):
    return [name for name, t in eager.items() if not torch.equal(captured[name], t)]


def replays(rank):
    """te.make_graphed_callables over pairs: replays on new values against eager, to the bit."""
    wrong = []
    torch.manual_seed(5 + rank)
    ways = [(None, sequence, recompute) for sequence, recompute in itertools.product((True, False), (True, False))]
    for recipe, sequence, recompute in [
        *ways,
        ("current", True, True),
        ("block", True, False),
        ("delayed", True, True),
    ]:
        options = {} if recipe is None else {"enabled": True, "recipe": RECIPES[recipe]}

        def around(options=options):
            return te.autocast(**{"enabled": False, **options})

        module = pair(sequence, recompute)
        eager = copy.deepcopy(module)
        te.make_graphed_callables(module, (torch.zeros_like(drawn(), requires_grad=True),), **options)
        for number in range(STEPS):
            x, dy = drawn(), drawn()
            results = [step(m, m, x, dy, around) for m in (module, eager)]
            what = f"{recipe} sequence {sequence} recompute {recompute}, step {number}"
            wrong += [f"{what}: {name}" for name in differences(*results)]
    return wrong


def whole_steps(rank):
    """A forward and backward in one graph of torch's, against eager, to the bit."""
    wrong = []
    torch.manual_seed(5 + rank)
    for sequence, recompute in itertools.product((True, False), (True, False)):
        module = pair(sequence, recompute)
        eager, x, dy = copy.deepcopy(module), drawn().requires_grad_(), drawn()
        graph, captured = captured_step(module, x, dy, STEPS)
        for number in range(STEPS):
            with torch.no_grad():
                x.copy_(drawn())
                dy.copy_(drawn())
            graph.replay()
            wanted = step(eager, eager, x.detach(), dy, lambda: te.autocast(enabled=False))
            what = f"sequence {sequence} recompute {recompute}, step {number}"
            wrong += [f"{what}: {name}" for name in differences(captured, wanted)]
        del graph, captured
    return wrong
