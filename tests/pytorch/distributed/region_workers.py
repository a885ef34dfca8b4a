# The worker functions of test_regions.py, which run on each rank: the differentiable collectives, and their errors. A
# worker returns what its test compares.
import copy
import itertools
import pickle

import torch
import torch.distributed as dist
from rank_workers import of_rank
from ranks import here
from support import saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed as d

ROWS, WIDTH = 4, 3  # of each rank's input
MANY = (301, 17)

REGIONS = {
    "gather": d.gather_from_sequence_parallel_region,
    "reduce_scatter": d.reduce_scatter_to_sequence_parallel_region,
    "scatter": d.scatter_to_sequence_parallel_region,
    "reduce": d.reduce_from_tensor_model_parallel_region,
    "copy": d.copy_to_tensor_model_parallel_region,
}


def grads_of(rank, shape):
    """Gradients of `shape` in several layouts: their values, and what no collective can read where it lies."""
    values = of_rank(10 + rank, *shape)
    yield "contiguous", values
    yield "transposed", values.t().contiguous().t()
    yield "stride 0", torch.tensor(float(rank + 1), device=here()).expand(shape)
    yield "one row", of_rank(20 + rank, 1, shape[1]).expand(shape)


def regions(rank):
    """{name: output}, {name, layout: (gradient given, gradient got)}, and what was kept for the backward."""
    world = dist.group.WORLD
    out, grads, kept = {}, {}, {}
    for name, region in REGIONS.items():
        for layout in ("contiguous", "transposed"):
            # a sum of gradients is wanted where each rank's is a part: scatter and copy start from equal tensors
            x = of_rank(rank, ROWS, WIDTH)
            x = (x if layout == "contiguous" else x.t().contiguous().t()).requires_grad_()
            before = x.detach().clone()
            with saved_tensors() as saved:
                y = region(x, world)
            kept[name] = len(saved)
            out[name, layout] = y.detach().clone()
            for kind, grad in grads_of(rank, y.shape):
                given = grad.clone()
                (got,) = torch.autograd.grad(y, x, grad, retain_graph=True)
                assert torch.equal(grad, given), f"{name}: it wrote into the gradient that it was given"
                grads[name, layout, kind] = given, got
            assert torch.equal(x.detach(), before), f"{name}: it wrote into its input"
    twice = of_rank(rank, ROWS, WIDTH).requires_grad_()
    for name, region in REGIONS.items():
        y = region(twice, world)
        v = torch.ones_like(y, requires_grad=True)
        (g,) = torch.autograd.grad(y, twice, v, create_graph=True)
        (gg,) = torch.autograd.grad(g, v, torch.ones_like(g))  # of a linear map: that of ones
        out[name, "twice"] = gg
        out[name, "of ones"] = region(torch.ones(ROWS, WIDTH, device=here()), world)
    empty = torch.zeros(0, WIDTH, requires_grad=True, device=here())
    for name, region in REGIONS.items():
        y = region(empty, world)
        assert torch.autograd.grad(y.sum(), empty)[0].shape == y.shape == (0, WIDTH), name
    return out, grads, kept


def told_by(call, *args, **options):
    """(type, message) of what a call raises, or None."""
    try:
        call(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refusals(rank):
    """{case: (type, message)} of calls that are refused; each is followed by one that works. Ranks that bring different
    things are refused on the CPU alone, which the group reaches too."""
    world, told = dist.group.WORLD, {}

    def ones(*shape):
        return torch.ones(shape, device=here())

    calls = {**REGIONS, "gather_along_first_dim": d.gather_along_first_dim, "allreduce": d.allreduce}
    calls["reduce_scatter_along_first_dim"] = d.reduce_scatter_along_first_dim
    for name, call in calls.items():
        told[name, "uneven"] = told_by(call, torch.ones(ROWS + 2 * rank, WIDTH), world)
        told[name, "dtype"] = told_by(call, torch.ones(ROWS).to((torch.float32, torch.bfloat16)[rank]), world)
        told[name, "device"] = told_by(call, torch.ones(ROWS, device="meta"), world)
        told[name, "no tensor"] = told_by(call, [1.0], world)
        told[name, "no group"] = told_by(call, ones(ROWS), "world")
        if "scatter" in name:
            told[name, "rows"] = told_by(call, ones(3, WIDTH), world)
        assert told_by(call, ones(ROWS, WIDTH), world) is None, name
    other = REGIONS[("gather", "reduce")[rank]]
    told["other functions", "mixed"] = told_by(other, torch.ones(ROWS, WIDTH), world)
    of_first, gone = dist.new_group([0]), dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    for name, call in calls.items():
        told[name, "destroyed"] = told_by(call, ones(ROWS), gone)
        if rank == 1:
            told[name, "not in it"] = told_by(call, ones(ROWS), of_first)
        else:
            x = ones(ROWS, WIDTH)
            alone = call(x, of_first)
            assert (alone[0] if isinstance(alone, tuple) else alone) is x
    return told


def compiled(rank):
    """The differences of torch.compile's whole graphs of them from eager calls."""
    world, wrong = dist.group.WORLD, []
    calls = {**REGIONS, "gather_along_first_dim": d.gather_along_first_dim, "allreduce": d.allreduce}
    calls["reduce_scatter_along_first_dim"] = d.reduce_scatter_along_first_dim
    for name, call in calls.items():

        def step(x, call=call):
            y = call(x * 2, world)
            return (y[0] if isinstance(y, tuple) else y) + 1

        torch._dynamo.reset()
        x = of_rank(rank, ROWS, WIDTH).requires_grad_(name in REGIONS)
        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            y = function(x)
            grads = torch.autograd.grad(y, x, of_rank(5 + rank, *y.shape)) if name in REGIONS else ()
            results.append([y.detach(), *grads])
        wrong += [name for one, two in zip(*results, strict=True) if not torch.equal(one, two)]
    return wrong


def symmetric_modules(rank):
    """Modules with symmetric_ar_type: where it adds up a row's output, the bits of symmetric_all_reduce; and everywhere
    else those of a module without. On the CPU both are the group's sum. Returns what differs."""
    wrong, shared = [], {"tp_group": dist.group.WORLD, "device": here()}
    x = of_rank(rank, 6, 16).to(here())

    def built(name, **options):
        torch.manual_seed(3)
        if name == "mlp":
            return te.LayerNormMLP(16, 32, set_parallel_mode=True, **shared, **options)
        if name == "norm":
            return te.LayerNormLinear(16, 32, parallel_mode="column", **shared, **options)
        return te.Linear(32 if name == "row" else 16, 32, parallel_mode=name, **shared, **options)

    def results(module, call=None):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = (module if call is None else call)(leaf)
        y.backward(torch.cos(y.detach()))
        return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]

    for name, kind, sequence in itertools.product(
        ("row", "column", "norm", "mlp"), ("one_shot", "two_shot"), (False, True)
    ):
        plain, module = (built(name, sequence_parallel=sequence, **o) for o in ({}, {"symmetric_ar_type": kind}))
        wanted, found = results(plain), results(module)
        ways = [results(copy.deepcopy(module)), results(pickle.loads(pickle.dumps(module)))]
        if name == "row" and not sequence:
            torch._dynamo.reset()
            ways.append(results(module, torch.compile(module, backend="aot_eager", fullgraph=True)))
        close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted, found))
        same = all(torch.equal(a, b) for way in ways for a, b in zip(found, way))
        adds = any(row.op == "group_symmetric_sum" for row in te.explain(module, x).rows)
        if not close or not same or adds != (name in ("row", "mlp") and not sequence):
            wrong.append(f"{name} {kind} sequence {sequence}: close {close}, same {same}, symmetric {adds}")
    row = built("row", symmetric_ar_type="one_shot")
    part = torch.nn.functional.linear(x, row.weight).detach()
    total, _ = d.symmetric_all_reduce(part, all_reduce_type="one_shot")
    wrong += [] if torch.allclose(row(x), total + row.bias, atol=1e-5) else ["one_shot of a module"]
    return wrong


def symmetric(rank):
    world, x = dist.group.WORLD, of_rank(rank, ROWS, WIDTH)
    before, sums = x.clone(), {}
    for kind in ("one_shot", "two_shot"):
        sums[kind], work = d.symmetric_all_reduce(x, world, all_reduce_type=kind)
        assert work is None
        sums[f"{kind} of all ranks"], _ = d.symmetric_all_reduce(x, all_reduce_type=kind)
        sums[f"{kind} transposed"], _ = d.symmetric_all_reduce(x.t(), world, all_reduce_type=kind)
        sums[f"{kind} later"], work = d.symmetric_all_reduce(x, world, async_op=True, all_reduce_type=kind)
        work.wait()
        for dtype in (torch.float32, torch.bfloat16):  # after a small one: the shared memory has to grow
            many = of_rank(30 + rank, *MANY).to(dtype)
            sums[f"{kind} of many, {dtype}"], _ = d.symmetric_all_reduce(many, world, all_reduce_type=kind)
    assert torch.equal(x, before)
    kind = {"all_reduce_type": "one_shot"}
    empty, work = d.symmetric_all_reduce(torch.ones(0, WIDTH, device=here()), world, True, **kind)
    assert work.wait() and work.is_completed()
    refused = {
        "multimem": told_by(d.symmetric_all_reduce, x, world),
        "uneven": told_by(d.symmetric_all_reduce, x[rank:].cpu(), world, **kind),
        "device": told_by(d.symmetric_all_reduce, torch.ones(2, device="meta"), world, **kind),
    }
    return {"sums": sums, "empty": empty, "refused": refused}
