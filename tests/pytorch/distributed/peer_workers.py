# Layers over channels to peers (tp_overlap="chunked") beside the same layers over the group, on each of several ranks
# (ranks.py starts them). No test here: each worker returns what is wrong, as words.
import gc
import itertools
import os
import sys

import torch
import torch.distributed as dist
from ranks import here, on_cuda

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed import peer
from transformer_engine.pytorch.distributed.peer import kind_of

from .parallel_modules import RECIPES

# On CUDA large enough that no algorithm splits the reduction. TOKENS is per rank: a rank's own rows are more than one
# tile, and no multiple of it.
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


def memory_of_channels():
    """How often this process maps host memory that channels share, and how many descriptors of it are open."""
    gc.collect()
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    opened = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    with open("/proc/self/maps") as file:
        return tuple(sum("memfd:te_peer" in line for line in lines) for lines in (file, opened))


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


def explained(rank, overlap="chunked", **options):
    """(op, path, reason) of each call of a layer's forward and backward that te.explain lists, in their order."""
    before = _C.set_cpu_products("loop")
    found = {}
    for kind in ("column", "row", "norm"):
        module = made(kind, overlap, torch.bfloat16, **(options if kind != "row" else {}))
        x = example(kind, rank, torch.bfloat16)
        rows = te.explain(module, x.requires_grad_()).rows
        found[kind] = [(row.op, row.path, row.why_not_faster) for row in rows]
    _C.set_cpu_products(before)
    return found


def python_calls(run, *args):
    """The number of functions of Python that run(*args) calls."""
    calls = []
    gc.collect()
    gc.disable()  # finalizers are calls too
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        run(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(calls)


def host_work(rank):
    """Of a layer's forward in chunks: its calls of Python functions, those over the group, and ATen's operators."""
    before, found = _C.set_cpu_products("loop"), {}
    for kind in ("column", "row"):
        x, calls = example(kind, rank, torch.bfloat16), []
        with torch.no_grad():
            for overlap in ("off", "chunked"):
                module = made(kind, overlap, torch.bfloat16, bias=False)
                module(x)  # the ranks meet
                calls.append(python_calls(module, x))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                module(x)
        found[kind] = *calls, {row.key: row.count for row in profile.key_averages() if row.key.startswith("aten::")}
    _C.set_cpu_products(before)
    return found


def explained_keeping(rank):
    return explained(rank, tp_recompute_allgather=False)


def left_to_backward_dw(rank):
    """Slots that are taken between a backward and backward_dw(), and the differences from serial after both."""
    before = _C.set_cpu_products("loop")
    serial = made("column", "off", torch.float32)
    module = made("column", "chunked", torch.float32, delay_wgrad_compute=True)
    module.load_state_dict(serial.state_dict())
    x = example("column", rank, torch.float32)
    wanted = step(serial, x)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(torch.cos(y.detach()))
    leased = te.distributed.comm_usage().leased
    module.backward_dw()
    got = {"y": y.detach(), "dx": leaf.grad, **{n: p.grad.clone() for n, p in module.named_parameters()}}
    _C.set_cpu_products(before)
    return leased, different("column", got, wanted)


def keeping_in_fp8(rank):
    """The paths of a layer that keeps what it gathers in blocks of FP8."""
    module = made("norm", "chunked", torch.bfloat16, tp_recompute_allgather=False)
    x = example("norm", rank, torch.bfloat16, 128)
    with te.autocast(enabled=True, recipe=RECIPES["block"]):
        rows = te.explain(module, x.requires_grad_()).rows
    return [row.path for row in rows if "gather" in row.op]


def of_costs(rank, costs):
    """Mode "auto" on a device whose kind has such costs: the differences from serial, and the paths of a column."""
    kind, products = kind_of(here()), _C.set_cpu_products("loop")
    _C.lend_comm_costs(kind, costs)
    wrong = []
    for name in ("column", "row", "mlp"):
        serial, module = made(name, "off", torch.bfloat16), made(name, "auto", torch.bfloat16)
        module.load_state_dict(serial.state_dict())
        for again in range(2):
            x = example(name, rank, torch.bfloat16, TOKENS, again)
            wrong += different(name, step(module, x), step(serial, x))
    paths = explained(rank, "auto")
    _C.lend_comm_costs(kind, None)
    _C.set_cpu_products(products)
    return wrong, paths


def out_of_reach(rank, costs):
    """One rank reports another boot id or pid namespace: the error that "chunked" raises each time; for "auto" with
    such costs the differences from serial, and (op, path, reason) of a column's calls."""
    raised = []
    for where in ("_boot", "_processes"):
        real = getattr(peer, where)
        if rank == 1:
            setattr(peer, where, lambda: "elsewhere")
        for kind in ("column", "mlp", "column"):
            try:
                step(made(kind, "chunked", torch.bfloat16), example(kind, rank, torch.bfloat16, 32))
            except NotImplementedError as error:
                raised.append(str(error))
        setattr(peer, where, real)
    if rank == 1:
        peer._boot = lambda: "elsewhere"
    return raised, memory_of_channels(), *of_costs(rank, costs)


def behind_what_is_late(rank):
    """A weight that is there late, and on one rank alone: what differs from serial with it."""
    wrong = []
    for kind in ("column", "row"):
        serial, module = made(kind, "off", torch.bfloat16), made(kind, "chunked", torch.bfloat16)
        module.load_state_dict(serial.state_dict())
        step(module, example(kind, rank, torch.bfloat16))
        for again in range(3):
            x = example(kind, rank, torch.bfloat16, TOKENS, again)
            wanted = step(serial, x)
            with torch.no_grad():
                module.weight.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            if rank == again % 2:
                torch.cuda._sleep(40_000_000)  # some 20 ms
            with torch.no_grad():
                module.weight.copy_(serial.weight)
            wrong += different(f"{kind} {again}", step(module, x), wanted)
    return wrong
