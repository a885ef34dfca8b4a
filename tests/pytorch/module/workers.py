# Programs under delayed scaling that two ranks run at the same time, each with batches of its own, and one process with
# the batches of both: the amaxes are those of all ranks, so that all three keep the same scales and histories.
import torch
import torch.distributed as dist
from fp8_steps import all_scales
from generated import Program

import transformer_engine.pytorch as te

from .programs import delayed

RANKS = 2


def of_each_rank(p, shape):
    """A tensor for each rank; their values differ in size."""
    seeds, sizes = ([p.getrandbits(31) for _ in range(RANKS)], [p.choice((0.1, 1.0, 5.0)) for _ in range(RANKS)])
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * s for seed, s in zip(seeds, sizes)]


def run(seed, rank, group=None):
    """The program of a seed by this rank; rank None: by one process on the batches of all. [scales of each step]."""
    with Program(seed, "ranks").told() as p:
        torch.manual_seed(seed)
        recipe = delayed(p)
        modules = torch.nn.ModuleList(te.Linear(16, 16, device="cpu") for _ in range(p.randint(1, 3)))
        flying, found = [], []
        for _ in range(p.randint(3, 6)):
            used, checkpointed, group_said = p.some(range(len(modules)), 0.7), p.chance(0.3), p.chance(0.5)
            shape = (p.randint(1, 5), 16)
            given = {i: (of_each_rank(p, shape), of_each_rank(p, shape)) for i in used}
            p.say(f"region of {used}, checkpoint {checkpointed}")
            ys = []
            with te.autocast(recipe=recipe, amax_reduction_group=group if group_said else None):
                for i, both in given.items():
                    x, dy = (torch.cat(t) if rank is None else t[rank] for t in both)
                    x.requires_grad_()
                    y = te.checkpoint(modules[i], x, use_reentrant=p.chance(0.5)) if checkpointed else modules[i](x)
                    ys.append((y, dy))
            flying.append(ys)
            while flying and p.chance(0.6):
                ys = flying.pop(p.randrange(len(flying)))
                p.say("a backward")
                torch.autograd.backward([y for y, _ in ys], [dy for _, dy in ys]) if ys else None
            found.append(all_scales(modules))
        return found


def programs(rank, seeds):
    """The results of each seed's program on this rank, step by step."""
    return {seed: run(seed, rank, dist.group.WORLD) for seed in seeds}
