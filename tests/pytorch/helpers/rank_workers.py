# Worker functions of several suites, which run on each of several ranks (ranks.py starts them). A worker returns what
# its test compares.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from families import FAMILIES, build, inputs_of, train
from ranks import here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization.delayed import Region, ScalingState
from transformer_engine.pytorch.stash import PagedStash

STEPS, RATE = 3, 0.1


def of_rank(rank, *shape):
    """Whole numbers, so that sums of them are exact in any order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float().to(here())


def collectives(rank):
    world, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(2)][rank]
    x = of_rank(rank, 4, 3)
    got = {"input": x.clone()}
    for async_op in (False, True):
        for name, call in (
            ("gather", lambda a: distributed.gather_along_first_dim(x, world, async_op=a)),
            ("gather of columns", lambda a: distributed.gather_along_first_dim(x.t(), world, async_op=a)),
            ("reduce_scatter", lambda a: distributed.reduce_scatter_along_first_dim(x, world, async_op=a)),
            ("allreduce", lambda a: distributed.allreduce(x.clone(), world, async_op=a)),
            ("allreduce of all ranks", lambda a: distributed.allreduce(x.clone(), async_op=a)),
        ):
            result, work = call(async_op)
            assert (work is not None) == async_op, name
            if async_op:
                work.wait()
            got[f"{name}, async_op={async_op}"] = result
    out, rows = torch.full((8, 3), torch.nan, device=here()), torch.full((2, 3), torch.nan, device=here())
    assert distributed.gather_along_first_dim(x, world, output_tensor=out)[0] is out
    assert distributed.reduce_scatter_along_first_dim(x, world, output=rows)[0] is rows
    assert distributed.allreduce(x, alone)[0] is x
    got |= {"gather into a tensor": out, "reduce_scatter into a tensor": rows, "afterwards": x}
    try:
        distributed.reduce_scatter_along_first_dim(x[:3], world)
    except ValueError as error:
        got["three rows"] = str(error)
    return got


def batch_of(name, step, rank):
    torch.manual_seed(100 * step + rank)
    return inputs_of(name, here())[0]


def fresh(name):
    torch.manual_seed(5)
    return build(name, here())


def optimizer_of(module):
    return torch.optim.SGD(
        module.parameters(), RATE, momentum=0.9, foreach=False
    )  # as of DTensors, which have no other


def ddp(rank):
    """{family: (losses, parameters)} after a few steps, each rank with its own half of the data."""
    results = {}
    for name in FAMILIES:
        module = fresh(name)
        wrapper = DistributedDataParallel(module)
        losses = train(wrapper, [batch_of(name, step, rank) for step in range(STEPS)], optimizer_of(wrapper))
        results[name] = losses, {key: p.detach() for key, p in module.named_parameters()}
    return results


def whole(module):
    """A sharded module's parameters, put together."""
    return {key: p.full_tensor().detach() for key, p in module.named_parameters()}


def fsdp2(rank, folder):
    """As ddp, with the parameters sharded; the trained state is also saved by DCP, and loaded into a fresh module."""
    results, mesh = {}, init_device_mesh(here().type, (2,))
    for name in FAMILIES:
        module = fully_shard(fresh(name), mesh=mesh)
        losses = train(module, [batch_of(name, step, rank) for step in range(STEPS)], optimizer_of(module))
        results[name] = losses, whole(module)
        dcp.save(module.state_dict(), checkpoint_id=f"{folder}/{name}")
        other = fully_shard(FAMILIES[name](device=here()), mesh=mesh)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        other.load_state_dict(state)
        for key, tensor in whole(other).items():
            assert torch.equal(tensor, results[name][1][key]), f"{name}: {key}"
    return results


def delayed_scales(rank):
    """Scales of two states whose amaxes are reduced and of one whose are not, and how many reductions that took."""
    calls, reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(args)
        return reduce(*args, **kwargs)

    dist.all_reduce = counted
    states, region = [], Region()
    for reduce_amax, columns in ((True, 3), (True, 2), (False, 3)):
        rule = DelayedScaling(amax_history_len=2, reduce_amax=reduce_amax)
        state = ScalingState(rule, columns, here(), forward=True)
        state.amax_history[0] = 1.0 + rank
        region.add(state, None, forward=True)
        states.append(state)
    states[0].amax_history[0, 1] = 5.0 - rank
    try:
        region.update_forward()
    finally:
        dist.all_reduce = reduce
    return {"calls": len(calls), "scales": [state.scale.tolist() for state in states]}


def stash_gates(rank):
    """Rank 1 loses a group in the first step and not in the second; rank 0 has none at all."""
    got = []
    for stash, pages in ((PagedStash(256, 1, device=here()), 9), (PagedStash(256, 64, device=here()), 1)):
        stash.reset()
        if rank == 1:
            stash.stash("rows", [torch.ones(64, 64, device=here())], torch.tensor([pages], device=here()))
        got.append((float(stash.gate()), float(stash.gate(dist.group.WORLD)), stash.gate(dist.group.WORLD).dim()))
        stash.close()
    return got


def watch_gates(rank):
    """Rank 1 cuts rows in the first step and in no other. For each step: this rank's gate, that of both ranks, whether
    the weights moved, and whether the rank's own verdict is good."""
    torch.manual_seed(0)
    found = te.verdict.watch(here())
    layer = te.MoEMLP(64, 64, 4, 1, params_dtype=torch.bfloat16, device=here())
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.ones(300, 64, dtype=torch.bfloat16, device=here())
    with torch.no_grad():
        layer.router.weight.zero_()[0] = 1  # one expert has all tokens
    got, gates = [], []
    for factor in (0.5 if rank == 1 else None, None):
        layer.capacity_factor = factor
        found.reset()
        layer.zero_grad()
        layer(x)[0].float().sum().backward()
        gate = optimizer.found_inf = found.gate(dist.group.WORLD)
        before = layer.experts.fc2.weight.detach().clone()
        optimizer.step()
        moved = not torch.equal(before, layer.experts.fc2.weight)
        got.append((float(found.gate()), float(gate), moved, found.verdict(wait=True).ok))
        gates.append(gate)
    found.reset()
    assert gates[0] is gates[1], "each call writes the same tensor"
    return got


def mixtures_with_a_stash(rank):
    """Each rank has layers of its own; rank 1 has more live rows than its pool has pages. Before and after grow():
    the gate, whether the weights moved, whether the gradients are those without a stash, and the rank's verdict."""
    torch.manual_seed(0)
    options = {"experts": (0, 2), "params_dtype": torch.bfloat16, "device": here()}
    stash = PagedStash(512, 24, factor=1.0, device=here())
    layers = [te.MoEMLP(128, 128, 4, 1, stash=stash, **options) for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]
    x = torch.randn(48, 128, dtype=torch.bfloat16, device=here())
    with torch.no_grad():  # the sign of a token's first feature chooses between experts here and elsewhere
        x[:, 0] = -3
        x[: 48 if rank == 1 else 5, 0] = 3
        for layer in layers:
            layer.router.weight.mul_(0.01)
            layer.router.weight[:2, 0], layer.router.weight[2:, 0] = 1, -1
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def gradients(with_stash=True):
        for layer in layers:
            layer.stash = stash if with_stash else None
        y = x
        for layer in layers:
            y = y + layer(y)[0] * 0.01
        return torch.autograd.grad(y.float().sum(), parameters)

    def step():
        for parameter, gradient in zip(parameters, gradients(), strict=True):
            parameter.grad = gradient
        gate = stash.gate(dist.group.WORLD)
        if float(gate) == 0:
            optimizer.step()
        return float(gate)

    got, expected = [], gradients(with_stash=False)
    for run in (step, lambda: stash.rerun(step)):
        before = [p.detach().clone() for p in parameters]
        if run is step:
            stash.reset()
        gate = run()
        moved = any(not torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
        same = all(torch.equal(p.grad, q) for p, q in zip(parameters, expected, strict=True))
        verdict = stash.verdict(wait=True)
        got.append((gate, moved, same, verdict.ok))
        if not verdict.ok:
            stash.grow()
        for parameter in parameters:
            parameter.grad = None
    stash.close()
    return got
