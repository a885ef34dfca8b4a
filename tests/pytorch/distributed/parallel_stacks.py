# Stacks of divided layers with other features around them, on each of several ranks. No test here: ways() returns for
# each composition whether it has the bits of the plain run, or the error that it raised.
import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from ranks import here, share_a_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from .parallel_cases import collectives
from .region_workers import told_by

HIDDEN, WIDE = 32, 64
RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "delayed": DelayedScaling(reduce_amax=False),
}


def stack(group, **options):
    """Attention's projections without attention, an MLP, and the projections once more: equal layers, stacked."""
    torch.manual_seed(1)
    shared = {"device": here(), "tp_group": group, "sequence_parallel": True, **options}
    column = {"parallel_mode": "column", **shared}
    return torch.nn.Sequential(
        te.LayerNormLinear(HIDDEN, WIDE, **column),
        te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared),
        te.LayerNormMLP(HIDDEN, WIDE, set_parallel_mode=True, activation="swiglu", **shared),
        te.LayerNormLinear(HIDDEN, WIDE, **column),
        te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared),
        te.LayerNormLinear(HIDDEN, WIDE, **column),
        te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared),
    )


def backward(y):
    y.backward(torch.full_like(y, 0.5) + y.detach() * 0.1)


def run(module, x, call=None, microbatches=1, reverse=True):
    """All forwards, then all backwards, the last first; outputs, gradients of inputs and of parameters."""
    module.zero_grad(set_to_none=True)
    leaves = [(x * (i + 1)).requires_grad_() for i in range(microbatches)]
    results = [(call or module)(leaf) for leaf in leaves]
    for y in reversed(results) if reverse else results:
        backward(y)
    return [
        *(y.detach() for y in results),
        *(leaf.grad for leaf in leaves),
        *(p.grad.clone() for p in module.parameters()),
    ]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def one_by_one(module, x, microbatches):
    """Each microbatch's backward directly after its forward, the last first: nothing else is alive meanwhile."""
    module.zero_grad(set_to_none=True)
    found = []
    for i in reversed(range(microbatches)):
        leaf = (x * (i + 1)).requires_grad_()
        y = module(leaf)
        backward(y)
        found.insert(0, (y.detach(), leaf.grad))
    outputs, gradients = zip(*found)
    return [*outputs, *gradients, *(p.grad.clone() for p in module.parameters())]


def autocast(recipe):
    return nullcontext() if recipe is None else te.autocast(enabled=True, recipe=RECIPES[recipe])


def checkpointed(module, recipe, reentrant):
    def call(x):
        with autocast(recipe):
            return te.checkpoint(module, x, use_reentrant=reentrant)

    return call


def quantized(module, recipe):
    def call(x):
        with autocast(recipe):
            return module(x)

    return call


def offloaded(module):
    context, synchronize = te.get_cpu_offload_context(
        enabled=True, num_layers=3, model_layers=len(module), offload_activations=True
    )

    def call(x):
        for layer in module:
            with context:
                x = layer(x)
            x = synchronize(x)
        return x

    return call


def sharded(rank, x, wanted):
    mesh = init_device_mesh(here().type, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    module = stack(mesh["tp"].get_group())
    for layer in module:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    backward(module(x.clone().requires_grad_()))
    gradients = [p.grad.to_local() for p in module.parameters()]
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(gradients, wanted[2:]))


def gathers_of(call, x):
    """How often the stack's forward and backward gather."""
    sent = collectives(lambda: backward(call(x.clone().requires_grad_())))
    return sent.count("c10d::_allgather_base_")


def same_on_cpu(module, x, plain):
    def on_cpu(z):
        with torch.autograd.graph.save_on_cpu():
            return module(z)

    return same(plain, run(module, x, on_cpu))


def same_graphed(group, x):
    ours, eager = stack(group), stack(group)
    if here().type == "cuda" and share_a_device():  # gloo: the error names it, and eager calls still work
        words = told_by(te.make_graphed_callables, ours[2], (x.clone().requires_grad_(),))[1]
        return same(run(eager[2], x), run(ours[2], x)) if "gloo, which cannot be captured" in words else words
    captured = te.make_graphed_callables(ours[2], (x.clone().requires_grad_(),))
    return same(run(eager[2], x), run(ours[2], x, captured))


def finite_with_fp8_weights(group, x):
    with te.quantized_model_init(enabled=True, recipe=RECIPES["current"]):
        weights = stack(group)
    results = run(weights, x, quantized(weights, "current"))
    return all(t.isfinite().all() for t in results) and any(t.any() for t in results)


def same_compiled(group, x, recipe):
    ours = stack(group)
    torch._dynamo.reset()
    call = quantized(ours, recipe)
    return same(run(ours, x, call), run(ours, x, torch.compile(call, backend="aot_eager", fullgraph=True)))


def same_from_meta(group, x, plain):
    ours = stack(group, device="meta").to_empty(device=here())
    torch.manual_seed(1)
    for layer in ours:
        layer.reset_parameters()
    return same(plain, run(ours, x))


def finite_under_autocast(module, x):
    def call(z):
        with torch.autocast(here().type, torch.bfloat16):
            return module(z)

    results = run(module, x, call)
    return results[0].dtype == torch.bfloat16 and all(t.isfinite().all() for t in results)


def same_in_evaluation(module, x, plain):
    """Out of training and without gradients: the forward's bits."""
    module.eval()
    with torch.no_grad():
        out = module(x)
    module.train()
    return torch.equal(out, plain[0])


def checkpointed_ways(group, x, plain):
    """{name: call} of te.checkpoint for each recipe, beside the same stack without it."""
    ways = {}
    for recipe in (None, *RECIPES):
        wanted = plain if recipe is None else run(first := stack(group), x, quantized(first, recipe))
        for reentrant in (True, False):
            module = stack(group)
            results = functools.partial(run, module, x, checkpointed(module, recipe, reentrant))
            ways[f"te.checkpoint {recipe} {reentrant}"] = lambda made=results, wanted=wanted: same(wanted, made())
    return ways


def ways(rank):
    """{name: whether that way of running a divided stack gives the bits of a plain run, or its error}"""
    group = dist.group.WORLD
    torch.manual_seed(20 + rank)
    x = torch.randn(8, 2, HIDDEN).to(here())
    module = stack(group)
    plain = run(module, x)
    alone = dist.new_group([rank], use_local_synchronization=True)

    def torch_checkpoint(z):
        return torch.utils.checkpoint.checkpoint(module, z, use_reentrant=False)

    calls = checkpointed_ways(group, x, plain) | {
        "torch's checkpoint": lambda: same(plain, run(module, x, torch_checkpoint)),
        "two microbatches": lambda: same(run(module, x, microbatches=2), one_by_one(module, x, 2)),
        "offload": lambda: same(plain, run(module, x, offloaded(module))),
        "save_on_cpu": lambda: same_on_cpu(module, x, plain),
        "graphed": lambda: same_graphed(group, x),
        "ddp": lambda: same(plain, run(module, x, DistributedDataParallel(module, process_group=alone))),
        "fsdp2": lambda: sharded(rank, x, plain),
        "weights in FP8": lambda: finite_with_fp8_weights(group, x),
        **{
            f"compiled {recipe}": functools.partial(same_compiled, group, x, recipe)
            for recipe in (None, "current", "block")
        },
        "meta": lambda: same_from_meta(group, x, plain),
        "torch.autocast": lambda: finite_under_autocast(module, x),
        "eval": lambda: same_in_evaluation(module, x, plain),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["gathers"] = gathers_of(module, x), gathers_of(checkpointed(module, None, True), x)
    return found


def divided_inputs(rank):
    """Checkpoints whose input is kept in parts: the bits of a plain run, the whole let go, and what is refused (where
    ranks bring different things, on the CPU alone, which the group reaches too)."""
    found, group = {}, dist.group.WORLD
    torch.manual_seed(7)  # the same tokens on every rank
    x = torch.randn(7, 3, HIDDEN).to(here())
    module = stack(group, sequence_parallel=False)
    plain = run(module, x)
    for reentrant in (True, False):
        gone = []

        def call(leaf, reentrant=reentrant, gone=gone):
            hidden = leaf * 1.0
            options = {"use_reentrant": reentrant, "distribute_saved_activations": True, "tp_group": group}
            y = te.checkpoint(module, hidden, **options)
            storage = StorageWeakRef(hidden.untyped_storage())
            del hidden
            gone.append(storage.expired())
            return y

        found[reentrant] = same(plain, run(module, x, call)), gone
    there = stack(group, sequence_parallel=False, device="cpu")
    for called, options, inp in (
        (module, {"tp_group": None}, x),
        (there, {"tp_group": group}, x[: rank + 1].cpu()),
    ):
        try:
            te.checkpoint(called, inp.clone().requires_grad_(), distribute_saved_activations=True, **options)
            found[len(found)] = "nothing"
        except ValueError as error:
            found[len(found)] = str(error)
    try:
        te.checkpoint(stack(group), x.requires_grad_(), distribute_saved_activations=True, tp_group=group)
        found["sequence"] = "nothing"
    except ValueError as error:
        found["sequence"] = str(error)
    return found
