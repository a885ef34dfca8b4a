# FP8 bits of divided modules, on each of several ranks (ranks.py starts them). No test here: a worker returns what is
# wrong, as words.
import itertools

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import _C

from .parallel_cases import HIDDEN, WIDE, Twins
from .parallel_modules import OVERRIDDEN, RECIPES, linear, own_quantizer


def drawn(exact, *shape):
    """Normal values; or exact: -1, 0, 1 and one 7, of which scales are powers of two (448 and 57344 are 7 of them) and
    every sum of products is exact, in whatever order a device adds them up."""
    if not exact:
        return torch.randn(shape)
    t = torch.randint(-1, 2, shape).float()
    t[(0,) * len(shape)] = 7.0
    return t


def planted(t, ranks, dim, largest):
    """t with the same largest value in each rank's part, so that parts have the scale of the whole."""
    for piece in t.chunk(ranks, dim):
        piece[(0,) * t.dim()] = largest
    return t


def fp8_bits(rank, exact):
    """Gathered FP8 operands equal those of the whole tensor: results without sums over ranks have the bits of the
    undivided module. With any values if CPU GEMMs are computed by loops; else with values whose sums are exact.
    (recipe, rows of a rank) -> (what differs, dtypes that the collectives carried)."""
    found, ranks, group = {}, dist.get_world_size(), dist.group.WORLD
    largest = 7.0 if exact else 8.0
    _C.set_cpu_products("libtorch" if exact else "loop")
    alone = DelayedScaling(amax_history_len=2, reduce_amax=False)
    recipes = {**RECIPES, "current": Float8CurrentScaling(), "unreduced": alone, "own": CustomRecipe(own_quantizer)}
    for name, rows, mode in itertools.product(
        ("current", "block", "delayed", "unreduced", "own", *OVERRIDDEN), (128, 64, 40), ("column", "row")
    ):
        torch.manual_seed(2)
        make = linear(mode, torch.bfloat16, bias=False)
        both = Twins(make, group, rank, inputs=None, outputs=None, sequence_parallel=True)
        with torch.no_grad():
            both.whole.weight.copy_(drawn(exact, *both.whole.weight.shape))
            planted(both.whole.weight, ranks, 0 if mode == "column" else 1, largest)
            both.divided.weight.copy_(both.of("weight", both.whole.weight))
        widths = (HIDDEN, WIDE) if mode == "column" else (WIDE, HIDDEN)
        wrong, carried = [], set()
        for _ in range(3 if name in ("delayed", "unreduced") else 1):  # scales follow what the steps before have seen
            # A gathered tensor has its largest value on one rank alone, the others theirs in every part.
            x, dy = drawn(exact, rows * ranks, widths[0]), drawn(exact, rows * ranks, widths[1])
            planted(dy if mode == "column" else x, ranks, 1, largest)
            x, dy = x.to(here(), torch.bfloat16), dy.to(here(), torch.bfloat16)
            both.whole.weight.grad = both.divided.weight.grad = None
            results = []
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
                for module, inputs, gradient in (
                    (both.whole, x, dy),
                    (
                        both.divided,
                        x.chunk(ranks, 0 if mode == "column" else 1)[rank].contiguous(),
                        dy.chunk(ranks, 1 if mode == "column" else 0)[rank].contiguous(),
                    ),
                ):
                    leaf = inputs.clone().requires_grad_()
                    with te.autocast(enabled=True, recipe=recipes[name]):
                        y = module(leaf)
                    y.backward(gradient)
                    results.append((y.detach(), leaf.grad, module.weight.grad))
            (y, dx, dw), (own_y, own_dx, own_dw) = results
            if mode == "column":
                equal = [(own_y, y.chunk(ranks, 1)[rank]), (own_dw, dw.chunk(ranks, 0)[rank])]
            else:
                equal = [(own_dx, dx.chunk(ranks, 1)[rank]), (own_dw, dw.chunk(ranks, 1)[rank])]
            wrong += [i for i, (one, other) in enumerate(equal) if not torch.equal(one, other)]
            events = seen.profiler.kineto_results.events()
            carried |= {kind for e in events if e.name() == "c10d::_allgather_base_" for kind in e.dtypes() if kind}
        found[name, rows, mode] = wrong, carried - {"Scalar"}
    _C.set_cpu_products("libtorch")
    return found
