# Edges of tensor parallelism, on each of several ranks (ranks.py starts them): ranks that disagree, and shapes and
# options that meet seldom. No test here: a worker returns what it found.
import contextlib
import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from ranks import here, making_tensors_here, one_by_one, ranks_compare
from torch.distributed.device_mesh import init_device_mesh

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import linear

from .parallel_cases import collectives
from .parallel_modules import own_quantizer

RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling, "delayed": DelayedScaling, "none": None}


def column(**options):
    shared = {"sequence_parallel": True, "tp_group": dist.group.WORLD, "device": here()}
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
    """The error of each rank where the ranks quantize differently, or where one gathers in a backward and the other in
    a forward; and whether the next call works."""
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
    x = torch.randn(128, 32)
    norm = te.LayerNorm(32, sequence_parallel=True, device=here())
    norm(x).sum().backward()
    for function in (
        te.distributed.gather_from_sequence_parallel_region,
        te.distributed.allreduce_sequence_parallel_grads,
    ):
        argument = norm if function is te.distributed.allreduce_sequence_parallel_grads else x
        words = said(lambda function=function, argument=argument: call(other) if rank else function(argument))
        found.append((function.__name__, words, call(other).shape == (256, 16)))
    return found


def ended_alone(rank):
    """The error of each rank where a call fails on one of them before the collective, and whether the next call works.
    (what, words, works)."""
    world = {"tp_group": dist.group.WORLD, "device": here()}
    divided = column(sequence_parallel=False)  # its forward has no collective: that of the row after it has
    row = te.Linear(32, 32, parallel_mode="row", **world)
    stack = lambda x: row(divided(x))  # noqa: E731
    norm = te.LayerNormLinear(32, 32, parallel_mode="column", sequence_parallel=True, **world)
    x, target = torch.randn(16, 1, 32), torch.randint(0, 32, (16,))
    loss = lambda t: te.parallel_cross_entropy(torch.randn(16, 16), t, 0.0, True, dist.group.WORLD)  # noqa: E731
    head = torch.randn(16, 32)
    fused = lambda t: te.fused_linear_cross_entropy(  # noqa: E731
        torch.randn(16, 32), head, t, dist_process_group=dist.group.WORLD
    )
    calls = {
        "width": (mlp(), x, torch.randn(16, 1, 33)),
        "dtype": (mlp(), x, x.double()),
        "norm": (norm, x, torch.randn(16, 1, 31)),
        "divided": (stack, x, torch.randn(16, 1, 31)),
        "row": (row, torch.randn(16, 1, 16), torch.randn(16, 1, 15)),
        "loss": (loss, target, target.int()),
        "fused": (fused, target, target[:15]),
    }
    found = []
    for what, (function, good, bad) in calls.items():
        words = said(lambda function=function, good=good, bad=bad: function(bad if rank else good))
        found.append((what, words, said(lambda function=function, good=good: function(good))))
    return found


def devices_and_groups(rank):
    """How a module uses its group, and its errors for groups that it cannot use."""
    world, meta = dist.group.WORLD, column(device="meta")
    alone = [dist.new_group([member]) for member in range(dist.get_world_size())]
    norm = te.LayerNormMLP(
        32, 64, set_parallel_mode=True, tp_group=world, device=here(), return_layernorm_output=True,
        return_layernorm_output_gathered=True,
    )  # fmt: skip
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    return {
        "sizes": [column(tp_size=size).tp_size for size in (1, 2, 4)],
        "whole": norm(torch.randn(4, 32))[1].shape == (4, 32),
        "meta": said(lambda: meta(torch.randn(4, 32, device="meta"))),
        "not in it": said(lambda: column(tp_group=alone[1 - rank])),
        "no group": said(lambda: column(tp_group=init_device_mesh(here().type, (2,)))),
        "destroyed": said(lambda: column(tp_group=gone)),
    }


def mlp(**options):
    shared = {"set_parallel_mode": True, "sequence_parallel": True, "tp_group": dist.group.WORLD, "device": here()}
    return te.LayerNormMLP(32, 64, **{**shared, **options})


def no_tokens(rank):
    """Shapes without an element through every format that something is kept in: that of the output and the gradient."""
    wrong = []
    for recipe, shape, options in itertools.product(
        RECIPES, ((0, 2, 32), (4, 0, 32), (0, 32)), ({}, {"checkpoint": True}, {"save_preactivation": "fp8"})
    ):
        x = torch.randn(shape, requires_grad=True)
        chosen = RECIPES[recipe]
        module = mlp(**options)

        def run(module=module, x=x, chosen=chosen):
            with te.autocast(enabled=chosen is not None, recipe=chosen and chosen()):
                y = module(x)
            y.sum().backward()
            assert y.shape == x.shape == x.grad.shape and not module.fc2_bias.grad.any()

        words = said(run)
        wrong += [f"{recipe} {shape} {options}: {words}"] if words != "nothing" else []
    return wrong


def without_dimensions(rank):
    """The errors of modules for an input that has the features as its only dimension: the first one must be tokens."""
    norm = te.LayerNormLinear(
        32, 32, parallel_mode="column", sequence_parallel=True, tp_group=dist.group.WORLD, device=here()
    )
    return [said(lambda module=module: module(torch.randn(32))) for module in (mlp(), norm, column())]


def called_sinks(rank):
    """A weight gradient as a Python gradient accumulator gets it, in one and in parts, against autograd's."""
    wrong = []
    for mode, recompute in ((1, 1), (1, 0), (2, 0)):
        tp_comm = _C.GroupTPComm(mode, True, bool(recompute), dist.get_world_size(), dist.group.WORLD.group_name)
        torch.manual_seed(rank)
        x, weight, bias = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
        dy = torch.randn(*(linear(x, weight, bias, tp_comm=tp_comm).shape))
        found = []

        def in_parts(product, with_bias, found=found):
            grad = torch.full((16, 32), torch.nan, device=here())  # in autograd's thread
            sums = [product.accumulate(grad[a:b], a, b - a, with_bias, True) for a, b in ((0, 6), (6, 16))]
            found.append(grad)
            return grad, torch.cat(sums)

        for grad_accumulator in (None, lambda product, with_bias: product.compute(with_bias), in_parts):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            linear(*leaves, grad_accumulator=grad_accumulator, tp_comm=tp_comm).backward(dy)
            found.append([leaf.grad for leaf in leaves])
        plain, computed, parts, summed = found
        same = all(torch.equal(a, b) for a, b in zip(plain, computed))
        close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip((plain[1], *plain), (parts, *summed)))
        wrong += [] if same and close else [(mode, recompute, same, close)]
    return wrong


def gathers_of_checkpoints(rank):
    """(recipe, reentrant) -> how often a column inside of a checkpoint gathers in all; of blocks data and scales."""
    found = {}
    for recipe, reentrant, recompute in itertools.product(RECIPES, (True, False), (True, False)):
        module = column(tp_recompute_allgather=recompute)

        def again(x, module=module, recipe=recipe):
            chosen = RECIPES[recipe]
            with te.autocast(enabled=chosen is not None, recipe=chosen and chosen()):
                return module(x)

        def step(again=again, reentrant=reentrant):
            te.checkpoint(again, torch.randn(128, 32, requires_grad=True), use_reentrant=reentrant).sum().backward()

        found[recipe, reentrant, recompute] = collectives(step).count("c10d::_allgather_base_")
    return found


class Under(torch.nn.Module):
    """A module under a recipe, for te.explain."""

    def __init__(self, inner, recipe):
        super().__init__()
        self.inner, self.recipe = inner, recipe

    def forward(self, x):
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.inner(x)


def explained(rank):
    """(recipe, tokens of a rank) -> op, path and reason of what te.explain shows of an MLP's communication."""
    found = {}
    for name, tokens in (("block", 128), ("block", 64), ("current", 64), ("delayed", 64), ("own", 128)):
        recipe = CustomRecipe(own_quantizer) if name == "own" else RECIPES[name]()
        told = te.explain(Under(mlp(), recipe), torch.randn(tokens, 32, requires_grad=True))
        found[name, tokens] = {
            (row.module, row.op, row.path, row.why_not_faster) for row in told.rows if row.op.startswith("group")
        }
    return found


def dropped_paths(rank):
    """(layout, forked around, compiled) -> which sequences of the batch a rank's tokens are kept of."""
    found = {}
    for layout, forks, traced in itertools.product(("sbhd", "bshd"), (True, False), (False, True)):
        if traced and forks:
            continue
        tracker = te.CudaRNGStatesTracker()
        there = here().type == "cuda"  # a tracker's states are where layers are
        with mock.patch("torch.cuda.is_available", return_value=there):
            tracker.add("model-parallel-rng", 100 + rank)
        layer = te.TransformerLayer(
            32, 64, 4, drop_path_rate=0.5, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=layout,
            set_parallel_mode=True, sequence_parallel=True, tp_group=dist.group.WORLD, device=here(),
            get_rng_state_tracker=None if traced else functools.partial(itself, tracker),
        )  # fmt: skip
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.self_attention.proj.bias.fill_(1.0)
        torch.manual_seed(7)
        shape = (4, 32, 32) if layout == "sbhd" else (32, 4, 32)
        if traced:
            torch._dynamo.reset()
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        with tracker.fork() if forks else contextlib.nullcontext():
            y = layer(torch.zeros(shape, device=here(), requires_grad=True)).detach()
        found[layout, forks, traced] = y.flatten(1)[0].unflatten(0, (32, 32))[:, 0] if layout == "sbhd" else y[:, 0, 0]
    return found


def itself(thing):
    return thing


def everything(rank):
    """One start of the ranks for all of them."""
    workers = [no_tokens, without_dimensions, called_sinks, gathers_of_checkpoints, explained, devices_and_groups]
    with making_tensors_here():
        found = one_by_one(rank, [*([disagreeing, ended_alone] if ranks_compare() else []), *workers])
    return found | one_by_one(rank, [dropped_paths])  # which compiles: a device's context would break the graph
