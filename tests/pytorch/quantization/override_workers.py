# The worker functions of test_backward_override_ranks.py, which run on each of several ranks: divided modules under a
# backward_override against the divided modules of the reference, and compiled ones, as words. No test here.
import itertools

import torch
import torch.distributed as dist
from ranks import here

from ..distributed.parallel_modules import MODULES
from .override_reference import RECIPES, WORDS, around, referred, results, step

OPTIONS = {
    "column": ({}, {"delay_wgrad_compute": True}),
    "row": ({}, {"delay_wgrad_compute": True}),
    "norm": ({}, {"recompute_norm_output": True}),
    "mlp": ({}, {"checkpoint": True}, {"recompute_norm_output": True}),
}
KEEPS = ({}, {"tp_recompute_allgather": False})  # what a column has gathered


def input_of(kind, tokens, dtype):
    """A rank's part: of the tokens, or of a row's columns."""
    torch.manual_seed(100 + dist.get_rank())
    width = 48 // dist.get_world_size() if kind == "row" else 32
    return torch.randn(tokens, width).to(here(), dtype)


def each():
    """Rows of a rank: 128, of which FP8 blocks can be gathered, and 24, of which values are, and then quantized."""
    for name, recipe, word, tokens in itertools.product(OPTIONS, RECIPES, WORDS, (128, 24)):
        for options, keep, sequence in itertools.product(OPTIONS[name], KEEPS, (True, False)):
            if keep and (name == "row" or not sequence):
                continue
            rows = tokens * dist.get_world_size() if name == "row" or not sequence else tokens
            yield name, recipe, word, rows, {**options, **keep}, sequence


def differing(what, got, wanted):
    return [f"{what}: {key}" for key, t in wanted.items() if t is not None and not torch.equal(got[key], t)]


def against_the_reference(rank):
    wrong = []
    for name, recipe, word, rows, options, sequence in each():
        make, kind, _ = MODULES[name]
        torch.manual_seed(3)
        module = make(torch.bfloat16, **options)(tp_group=dist.group.WORLD, sequence_parallel=sequence)
        x = input_of(kind, rows, torch.bfloat16)
        delayed = options.get("delay_wgrad_compute", False)
        wanted = referred(module, x, recipe, word)
        got = step(module, x, recipe, word)
        if delayed:
            module.backward_dw()
            got |= {n: p.grad for n, p in module.named_parameters()}
        wrong += differing((name, recipe, word, rows, options, sequence), got, wanted)
    return wrong


def compiled(rank):
    wrong = []
    ways = (("column", {}), ("column", KEEPS[1]), ("mlp", {"checkpoint": True}))
    formats = (("current", 24), ("block", 128), ("block", 24))
    for (name, options), word, (recipe, rows) in itertools.product(ways, WORDS, formats):
        make, kind, _ = MODULES[name]
        module = make(torch.bfloat16, **options)(tp_group=dist.group.WORLD, sequence_parallel=True)
        x = input_of(kind, rows, torch.bfloat16)
        wanted = step(module, x, recipe, word)
        torch._dynamo.reset()

        def call(t, module=module, recipe=recipe, word=word):
            with around(recipe, word):
                return module(t)

        module.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        got = results(module, given, torch.compile(call, fullgraph=True, backend="aot_eager")(given))
        wrong += differing((name, recipe, word, rows, options), got, wanted)
    return wrong
