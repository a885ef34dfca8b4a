# Workers of test_beside.py: a run of two ranks beside the stash's gate and beside offload.
import contextlib

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import layer as offload_layer
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from transformer_engine.pytorch.stash import PagedStash

from .cases import each

HIDDEN, FFN, LAYERS, ROWS, LIVE = 32, 48, 3, 40, 7


class Stack(torch.nn.Module):
    """Layers that run in the contexts that `around` gives."""

    def __init__(self):
        super().__init__()
        options = {"bias": False, "device": here(), "fuse_wgrad_accumulation": True}
        self.layers = torch.nn.ModuleList(te.LayerNormMLP(HIDDEN, FFN, **options) for _ in range(LAYERS))
        self.around, self.behind = lambda i: contextlib.nullcontext(), lambda x: x

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            with self.around(i):
                x = layer(x)
            x = self.behind(x)
        return x


def made(sharded):
    torch.manual_seed(5)
    module = Stack()
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=True,
        overlap_param_gather=sharded,
        bucket_size=HIDDEN * FFN,
    )
    ddp = DistributedDataParallel(config, module)
    return ddp, DistributedOptimizer(te.optimizers.FusedAdam(module.parameters(), lr=1e-2), ddp, clip_grad=1.0)


def x_of(rank, step):
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
    x[LIVE:] = 0.0
    return x.to(here()).requires_grad_()


def weights(ddp):
    return {name: value.clone() for name, value in ddp.state_dict().items() if isinstance(value, torch.Tensor)}


def same(got, wanted, what):
    for name, value in wanted.items():
        assert torch.equal(got[name], value), f"{what}: {name}"


def stash_gate(rank, ranks, sharded):
    """In its second step the last rank has more live rows than its pool has pages: both ranks skip that step, and go on
    as if it had not been."""
    (ddp, optimizer), (other, its_optimizer) = made(sharded), made(sharded)
    stash = PagedStash(256, 96, device=here())
    counter = torch.zeros(1, dtype=torch.int32, device=here())
    ddp.module.around = lambda i: stash.group(i, counter)
    gates = []
    for step in range(4):
        stash.reset()
        counter.fill_(ROWS if step == 1 and rank == ranks - 1 else LIVE)
        before = weights(ddp)
        optimizer.zero_grad()
        ddp(x_of(rank, step))[:LIVE].square().sum().backward()
        optimizer.found_inf = stash.gate(dist.group.WORLD)
        gates.append(float(optimizer.found_inf))
        optimizer.step()
        if step == 1:
            same(weights(ddp), before, "the step that is skipped")
            lost = stash.verdict(wait=True).report["flags"]
            assert bool(lost) == (rank == ranks - 1)
            continue
        its_optimizer.zero_grad()
        other(x_of(rank, step))[:LIVE].square().sum().backward()
        its_optimizer.step()
        same(weights(ddp), weights(other), f"step {step}")
    stash.close()
    assert gates == [0.0, 1.0, 0.0, 0.0]
    assert [int(count) for count in optimizer._steps.steps] == [3]


def offload(rank, ranks, sharded):
    """Two microbatches a step; what the layers saved goes to the host and comes back before their backward."""
    (ddp, optimizer), (other, its_optimizer) = made(sharded), made(sharded)
    context, ddp.module.behind = te.get_cpu_offload_context(True, LAYERS - 1, LAYERS)
    ddp.module.around = lambda i: context
    least = offload_layer.MIN_ELEMENTS
    offload_layer.MIN_ELEMENTS = 64
    try:
        for step in range(3):
            norms = []
            for wrapper, its in ((ddp, optimizer), (other, its_optimizer)):
                its.zero_grad()
                for number, held in enumerate((wrapper.no_sync(), contextlib.nullcontext())):
                    with held:
                        wrapper(x_of(rank, 2 * step + number)).square().sum().backward()
                norms.append(its.step())
            assert torch.equal(*norms), f"step {step}: norms {norms}"
            same(weights(ddp), weights(other), f"step {step}")
        assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
    finally:
        offload_layer.MIN_ELEMENTS = least


CASES = {
    f"{call.__name__}, {'sharded' if sharded else 'whole'}": (call, (sharded,))
    for call in (stash_gate, offload)
    for sharded in (False, True)
}


def everything(rank, ranks):
    return each(rank, ranks, CASES)
