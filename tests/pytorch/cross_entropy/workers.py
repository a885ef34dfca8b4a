# The worker functions of test_ranks.py, which run on each rank: losses whose classes are divided over the ranks. A
# worker returns what its test compares.
import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te

TOKENS, FEATURES, CLASSES = (6, 4), 16, 64  # CLASSES of all ranks
IGNORED = -100
OPTIONS = [
    {"label_smoothing": smoothing, "reduce_loss": reduce, "ignore_idx": ignored}
    for smoothing in (0.0, 0.2)
    for reduce in (False, True)
    for ignored in (IGNORED, 9)
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def whole(dtype):
    """(logits, hidden, weight, bias, target): the same on every rank, and where they are compared."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((*TOKENS, CLASSES), (*TOKENS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    logits, hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    target = torch.randint(0, CLASSES, TOKENS, generator=generator)
    target[0, 1] = target[3, 2] = IGNORED
    target[2] = 9
    logits[1, :, : CLASSES // 2] = -torch.inf  # nothing of the first shards is possible
    target[1] = torch.tensor([CLASSES - 1, CLASSES // 2, IGNORED, CLASSES - 2])
    return (*(t.to(here(), dtype) for t in (logits * 3, hidden, weight, bias)), target.to(here()))


def own(t, rank, dim):
    return t.chunk(dist.get_world_size(), dim)[rank].contiguous()


def _given(loss):
    return torch.linspace(0.5, 1.5, max(1, loss.numel()), device=loss.device).view(loss.shape)


def targets_of(target, options):
    """Both markers of an ignored token cannot be there at once."""
    return target if options["ignore_idx"] == IGNORED else target.masked_fill(target == IGNORED, 0)


def sharded(rank):
    """{dtype, number of options: (loss, gradient of the shard)}"""
    results = {}
    for dtype in DTYPES:
        logits, _, _, _, target = whole(dtype)
        for number, options in enumerate(OPTIONS):
            if options["label_smoothing"]:
                logits = logits.clamp_min(-8)  # a class of probability 0 has an infinite smoothed loss
            leaf = own(logits, rank, -1).requires_grad_()
            loss = te.parallel_cross_entropy(
                leaf * 1, targets_of(target, options), dist_process_group=dist.group.WORLD, **options
            )
            (grad,) = torch.autograd.grad(loss, leaf, _given(loss))
            results[dtype, number] = loss.detach(), grad
    return results


def fused(rank):
    """{dtype, number of options: (loss, gradients of hidden, of the shards of weight and bias)}"""
    results = {}
    for dtype in DTYPES:
        _, hidden, weight, bias, target = whole(dtype)
        for number, options in enumerate(OPTIONS):
            h, w, b = hidden.clone().requires_grad_(), own(weight, rank, 0), own(bias, rank, 0)
            w.requires_grad_(), b.requires_grad_()
            loss = te.fused_linear_cross_entropy(
                h, w, targets_of(target, options), b, dist_process_group=dist.group.WORLD, **options
            )
            grads = torch.autograd.grad(loss, (h, w, b), _given(loss))
            results[dtype, number] = loss.detach(), *grads
    return results


def composed(rank):
    """Fused, and a column-parallel Linear with the loss, sequence-parallel or not: (loss, hidden's, weight's gradient)
    of each; and compiled."""
    _, hidden, weight, _, target = whole(torch.float32)
    group, shard = dist.group.WORLD, own(weight, rank, 0)
    results = {}
    for sequence in (False, True):
        linear = te.Linear(
            FEATURES, CLASSES, bias=False, parallel_mode="column", tp_group=group, sequence_parallel=sequence,
            device=here(),
        )  # fmt: skip
        with torch.no_grad():
            linear.weight.copy_(shard)
        h = own(hidden, rank, 0) if sequence else hidden.clone()
        h.requires_grad_()
        loss = te.parallel_cross_entropy(linear(h), target, reduce_loss=True, dist_process_group=group)
        results["linear", sequence] = loss.detach(), *torch.autograd.grad(loss, (h, linear.weight))
        w = shard.clone().requires_grad_()
        loss = te.fused_linear_cross_entropy(h, w, target, dist_process_group=group, sequence_parallel=sequence)
        results["fused", sequence] = loss.detach(), *torch.autograd.grad(loss, (h, w))

    def loss_of(h, w):
        return te.fused_linear_cross_entropy(h * 2, w, target, dist_process_group=group)

    for name, call in (("eager", loss_of), ("compiled", torch.compile(loss_of, backend="aot_eager", fullgraph=True))):
        h, w = hidden.clone().requires_grad_(), shard.clone().requires_grad_()
        loss = call(h, w)
        results[name] = loss.detach(), *torch.autograd.grad(loss, (h, w))
    return results


def told_by(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refusals(rank):
    group, ranks = dist.group.WORLD, dist.get_world_size()
    classes = CLASSES // ranks
    target = torch.zeros(4, dtype=torch.int64, device=here())
    out = target.clone()
    out[2] = CLASSES
    told = {}
    uneven = torch.randn(4, classes + (rank == 0), device=here())
    told["uneven"] = told_by(lambda: te.parallel_cross_entropy(uneven, target, dist_process_group=group))
    even = torch.randn(4, classes, device=here())
    told["out of range"] = told_by(lambda: te.parallel_cross_entropy(even, out, dist_process_group=group))
    alone = dist.new_group([0])  # not this process's on other ranks
    told["not in it"] = (
        None if rank == 0 else told_by(lambda: te.parallel_cross_entropy(even, target, dist_process_group=alone))
    )
    if rank == 0:  # a group of one has no other rank to communicate with
        one = te.parallel_cross_entropy(even, target, dist_process_group=alone)
        assert torch.equal(one, te.parallel_cross_entropy(even, target))
    gone = dist.new_group()
    dist.destroy_process_group(gone)
    told["destroyed"] = told_by(lambda: te.parallel_cross_entropy(even, target, dist_process_group=gone))
    return told
