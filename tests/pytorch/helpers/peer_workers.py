# Layers over channels to peers (tp_overlap="chunked") beside the same layers over the group, on each of several ranks
# (ranks.py starts them). No test here: each worker returns what is wrong, as words.
import itertools

import torch
import torch.distributed as dist
from parallel_modules import RECIPES
from ranks import here, on_cuda

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

# On CUDA large enough that no algorithm splits the reduction. Tokens are a rank's: own rows are more than one tile, and
# no multiple of it.
HIDDEN, WIDE = (512, 768) if on_cuda() else (64, 96)
TOKENS, BATCH = (600, 2) if on_cuda() else (160, 2)


def made(kind, overlap, dtype, **options):
    torch.manual_seed(7)
    shared = {
        "tp_group": dist.group.WORLD,
        "sequence_parallel": True,
        "params_dtype": dtype,
        "device": here(),
        "tp_overlap": overlap,
        **options,
    }
    if kind == "column":
        return te.Linear(HIDDEN, WIDE, parallel_mode="column", **shared)
    if kind == "row":
        return te.Linear(WIDE, HIDDEN, parallel_mode="row", **shared)
    if kind == "norm":
        return te.LayerNormLinear(HIDDEN, WIDE, parallel_mode="column", **shared)
    return te.LayerNormMLP(HIDDEN, WIDE, set_parallel_mode=True, activation="swiglu", **shared)


def example(kind, rank, dtype, tokens=TOKENS, again=0):
    torch.manual_seed(100 * again + rank)
    width = WIDE // dist.get_world_size() if kind == "row" else HIDDEN
    first = tokens * dist.get_world_size() if kind == "row" else tokens
    return torch.randn(first, BATCH, width, dtype=dtype).to(here())


def step(module, x, recipe=None):
    """Output and all gradients of one forward and backward."""
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(leaf)
    y.backward(torch.cos(y.detach()))
    return {"y": y.detach(), "dx": leaf.grad, **{n: p.grad.clone() for n, p in module.named_parameters()}}


def different(what, got, wanted):
    return [f"{what}: {key}" for key in wanted if not torch.equal(got[key], wanted[key])]


def same_bits(rank, dtype, recipes=("none",), products="loop"):
    """Chunked against serial over the group, several calls of changing tokens, with and without what is kept."""
    wrong = []
    before = _C.set_cpu_products(products)
    for kind, bias, recipe in itertools.product(("column", "row", "norm", "mlp"), (True, False), recipes):
        for keep in ({}, {"tp_recompute_allgather": False}) if kind != "row" else ({},):
            serial = made(kind, "off", dtype, bias=bias, **keep)
            chunked = made(kind, "chunked", dtype, bias=bias, **keep)
            chunked.load_state_dict(serial.state_dict())
            for again, tokens in enumerate((TOKENS, 64, TOKENS)):
                x = example(kind, rank, dtype, tokens, again)
                wanted = step(serial, x, RECIPES[recipe])
                what = f"{kind} bias {bias} {recipe} {keep} {tokens}"
                wrong += different(what, step(chunked, x, RECIPES[recipe]), wanted)
    _C.set_cpu_products(before)
    return wrong, te.distributed.comm_usage()


def explained(rank):
    """What te.explain says of the exchanges of a layer."""
    before = _C.set_cpu_products("loop")
    found = {}
    for kind in ("column", "row"):
        module = made(kind, "chunked", torch.bfloat16)
        x = example(kind, rank, torch.bfloat16)
        found[kind] = str(te.explain(module, x.requires_grad_()))
    _C.set_cpu_products(before)
    return found
