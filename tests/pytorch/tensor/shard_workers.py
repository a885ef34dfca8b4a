# The worker functions of the suites of sharded masters, which run on each of several ranks (ranks.py starts them):
# weights of every format in one buffer of bytes, which the ranks share out in slices without regard to rows, blocks or
# weights.
import torch
import torch.distributed as dist
from quantized_cases import E4M3, E5M2, block2d, current, delayed, parts_of

from transformer_engine.pytorch.tensor import utils

# Format, shape, nominal dtype: rows that have a pitch, blocks that are cut off, more dimensions than two, one, none.
WEIGHTS = (
    (lambda: delayed(E4M3), (130, 40), torch.bfloat16),
    (lambda: current(E4M3), (256, 144), torch.bfloat16),
    (lambda: block2d(E4M3), (300, 200), torch.bfloat16),
    (lambda: block2d(E5M2, force_pow_2_scales=False, amax_epsilon=0.5), (3, 90, 48), torch.float16),
    (lambda: current(E5M2, force_pow_2_scales=True), (3, 5), torch.float32),
    (lambda: delayed(E5M2, scale=0.3), (64,), torch.float16),
    (lambda: block2d(E4M3), (0, 16), torch.float32),
    (lambda: current(E4M3, columnwise=False), (129, 128), torch.bfloat16),
)


WEIGHTS_WITH_ELEMENTS = [i for i, (_, shape, _) in enumerate(WEIGHTS) if torch.Size(shape).numel()]


def master_of(i, step):
    shape = WEIGHTS[i][1]
    generator = torch.Generator().manual_seed(100 * step + i)
    spread = 2.0 ** torch.randint(-4, 5, shape, generator=generator)
    return torch.randn(shape, generator=generator) * spread


def fresh_weights():
    return [make()(torch.ones(shape, dtype=dtype)) for make, shape, dtype in WEIGHTS]


def quantized_at_once(steps):
    """Parts and amaxes of the weights after so many steps."""
    weights = fresh_weights()
    for step in range(1, steps + 1):
        for i, weight in enumerate(weights):
            weight.quantize_(master_of(i, step).to(weight.dtype))
    return [(parts_of(w), getattr(w._quantizer, "amax", None)) for w in weights]


def raw_of(weight):
    return weight.get_data_tensors(columnwise_data=False)


class Sliced:
    """Weights whose data are one buffer, of which each rank has the slice between two of its bounds."""

    def __init__(self, rank, bounds):
        self.weights = fresh_weights()
        starts, at = [], 3  # off every alignment
        for weight in self.weights:
            starts.append(at)
            at += weight.numel() + 5
        self.buffer = torch.full((at,), 0xAB, dtype=torch.uint8)
        self.bounds = [round(f * at) for f in bounds]
        own = self.bounds[rank : rank + 2]
        self.offsets, self.ranges = [], []
        for weight, start in zip(self.weights, starts):
            utils.replace_raw_data(weight, self.buffer[start : start + weight.numel()].view(weight.shape))
            first, last = max(own[0], start), min(own[1], start + weight.numel())
            self.ranges.append((first - start, last - start) if first < last else None)
            self.offsets.append(first - start if first < last else None)

    def masters(self, step):
        flat = [master_of(i, step).view(-1) for i in range(len(self.weights))]
        return [None if r is None else m[slice(*r)].clone() for m, r in zip(flat, self.ranges)]

    def gather(self, rank, group):
        """Slices travel as they are; what this rank has of the others' is lost before."""
        for owner in range(dist.get_world_size(group)):
            part = self.buffer[self.bounds[owner] : self.bounds[owner + 1]]
            if owner != rank:
                part.fill_(0xCD)
            if len(part):
                dist.broadcast(part, owner, group=group)


def casts(rank, group, bounds, manual, steps):
    """The weights' parts after `steps` casts and gathers, their amaxes, what was reduced, whether memory stayed."""
    world, reductions, reduce = Sliced(rank, bounds), [], dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        reductions.append((str(op), tensor.numel()))
        return reduce(tensor, op, group, async_op)

    before = [{n: t.data_ptr() for n, t in parts_of(w).items()} for w in world.weights]
    dist.all_reduce = counted
    try:
        for step in range(1, steps + 1):
            cast = utils.quantize_master_weights if manual else utils.cast_master_weights_to_fp8
            options = {"manual_post_all_gather_processing": True} if manual else {}
            cast(world.weights, world.masters(step), world.offsets, group, **options)
            assert not any(w.get_usages()["columnwise"] for w in world.weights if w.numel())
            world.gather(rank, group)
            if manual:
                utils.post_all_gather_processing(world.weights)
    finally:
        dist.all_reduce = reduce
    for weight in world.weights:
        weight.update_usage(columnwise_usage=weight._quantizer.columnwise_usage)
    found = [(parts_of(w), getattr(w._quantizer, "amax", None)) for w in world.weights]
    stayed = [{n: t.data_ptr() for n, t in parts_of(w).items()} == b for w, b in zip(world.weights, before)]
    return found, reductions, stayed, world.ranges


def shards(rank, group):
    """The bytes go into memory of the shards alone; their scales, and whether the weights' own data are as before."""
    weights, ranks = [w for w in fresh_weights() if w.numel()], dist.get_world_size(group)
    masters, starts, targets = [], [], []
    for i, weight in enumerate(weights):
        size = -(-weight.numel() // ranks)
        start = min(rank * size, weight.numel())
        part = master_of(WEIGHTS_WITH_ELEMENTS[i], 1).view(-1)[start : start + size]
        masters.append(part)
        starts.append(start)
        targets.append(torch.full((len(part),), 0xAB, dtype=torch.uint8))
    before = [raw_of(w).clone() for w in weights]
    utils.quantize_master_weights(weights, masters, starts, group, targets)
    untouched = all(torch.equal(raw_of(w), b) for w, b in zip(weights, before))
    scales = [{n: p for n, p in parts_of(w).items() if "scale" in n and "column" not in n} for w in weights]
    return targets, scales, untouched


def in_groups(rank, bounds, steps):
    """{(ranks, what): result} of the groups of the first so many ranks, those that this one is in."""
    results = {}
    for ranks, of_group in bounds.items():
        group = dist.new_group(range(ranks))
        if rank < ranks:
            for manual in (False, True):
                results[ranks, manual] = casts(rank, group, of_group, manual, steps)
            results[ranks, "shards"] = shards(rank, group)
    return results
