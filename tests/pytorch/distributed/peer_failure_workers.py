# Ranks over channels to peers of which one calls alone, makes another call, or gives up, while all processes live
# (ranks.py starts them; peer_fault_workers.py has processes that die or are stopped). No test here: each worker returns
# the errors and results of its rank.
import copy
import time

import torch
import torch.distributed as dist
from ranks import on_cuda

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.peer import CommTimeout, channels_of
from transformer_engine.pytorch.graph.backend.cpu import RecordedGraph

from .captured_step import captured_step
from .peer_workers import example, made

TOKENS = 32


def met(call):
    """The error of call(): (words, op, peer, rank, step); None without an error."""
    try:
        call()
    except CommTimeout as error:
        return str(error), error.op, error.peer, error.rank, error.step
    return None


def all_here():
    dist.all_reduce(torch.zeros(1))


def channel():
    return channels_of(dist.group.WORLD.group_name)[0]


def end_of_streams():
    if on_cuda():
        torch.cuda.synchronize()


def ready(kind, rank, dtype=torch.float32, tokens=TOKENS, **options):
    """A layer and an input, after all ranks have made theirs: the deadline starts with the calls that follow."""
    found = made(kind, "chunked", dtype, **options), example(kind, rank, dtype, tokens)
    end_of_streams()
    all_here()
    return found


def is_nan(t):
    return bool(torch.isnan(t).all())


def forward(module, x):
    with torch.no_grad():
        return module(x)


def until_raised(call, steps=1000):
    """The first error of repeated calls: on CUDA, call() raises it after the call that failed."""
    for _ in range(steps):
        found = met(call)
        if found is not None:
            return found
        end_of_streams()
    return None


def calls_alone(rank):
    """Rank 0 calls once more than rank 1, which lives: what it has then, and what the next call of each raises."""
    module, x = ready("column", rank)
    forward(module, x)
    y = forward(module, x) if rank == 0 else None
    end_of_streams()
    all_here()
    return y is None or is_nan(y), met(lambda: forward(module, x)), met(lambda: forward(module, x))


def meets_alone(rank):
    """Rank 1 does not come to the first call; both come to the second."""
    module, x = ready("column", rank)
    before = time.monotonic()
    found = met(lambda: forward(module, x)) if rank == 0 else None
    waited = time.monotonic() - before
    all_here()
    if rank == 1:
        met(lambda: forward(module, x))
    all_here()
    return found, waited


def gathers_alone(rank):
    """In a backward that only gathers the input again, for the weight: rank 0 alone. Its gradient."""
    module, x = ready("column", rank)
    for number in range(2):
        module.zero_grad(set_to_none=True)
        y = module(x)
        if number == 0 or rank == 0:
            y.sum().backward()
        end_of_streams()
        sound = number == 1 or not torch.isnan(module.weight.grad).any()
    all_here()
    return sound, rank == 1 or is_nan(module.weight.grad), met(lambda: forward(module, x))


def other_dtypes(rank):
    """Ranks of which one computes in bfloat16: where memory has room for both, and where it grows."""
    dtype = (torch.float32, torch.bfloat16)[rank]
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    found = []
    for group, roomy in zip(groups, (True, False)):
        if roomy:
            forward(*ready("column", rank, tokens=4 * TOKENS, tp_group=group))
        module, x = ready("column", rank, dtype, tp_group=group)
        found.append(until_raised(lambda module=module, x=x: forward(module, x)))
    return found


def raises_inside_a_call(rank):
    """Rank 0's weight gradient has nowhere to go, when rows for it are on their way: what its backward raises, and the
    next call of each."""
    module, x = ready("column", rank, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(module.weight.shape, device=x.device)
    module(x.clone().requires_grad_()).sum().backward()
    y = module(x.clone().requires_grad_())
    end_of_streams()
    all_here()  # otherwise a rank that has not called yet would raise the error in its forward
    if rank == 0:
        module.weight.main_grad = torch.zeros(3, 3, device=x.device)
    words = ""
    try:
        y.sum().backward()
    except (RuntimeError, ValueError) as error:
        words = str(error)
    end_of_streams()
    all_here()
    return words, met(lambda: forward(module, x))


def replays_on_a_failed_channel(rank):
    """Replays of te.make_graphed_callables after rank 1 gives up the channel: before a forward, between it and its
    backward, and before delayed weight gradients. The error of each, the number of graphs that were replayed until
    then, and the error of the next eager call."""
    replays = []
    real = RecordedGraph.replay
    RecordedGraph.replay = lambda graph: (replays.append(graph), real(graph))[1]
    before = _C.set_cpu_products("loop")
    found = []
    for behind in range(3):
        group = dist.new_group([0, 1])
        module, x = ready("norm", rank, torch.bfloat16, tp_group=group, delay_wgrad_compute=behind == 2)
        module(x.clone().requires_grad_()).sum().backward()
        module.drop_backward_dw()
        eager = copy.deepcopy(module)
        te.make_graphed_callables(module, (torch.zeros_like(x, requires_grad=True),))
        leaf = x.clone().requires_grad_()
        y = module(leaf) if behind else None
        dy = torch.ones_like(y) if behind else None
        if behind == 2:
            y.backward(dy)
        end_of_streams()
        all_here()
        if rank == 1:
            channels_of(group.group_name)[0].give_up("by hand")
        all_here()
        count = len(replays)
        calls = (lambda m=module, x=leaf: m(x), lambda y=y, dy=dy: y.backward(dy), module.backward_dw)
        found.append((met(calls[behind]), len(replays) - count, met(lambda m=eager, x=x: forward(m, x))))
    RecordedGraph.replay = real
    _C.set_cpu_products(before)
    return found


def plain_graphs_on_a_failed_channel(rank):
    """A graph of torch's: its replay raises nothing, and what it writes is NaN; the next eager call raises."""
    module, x = ready("mlp", rank, torch.bfloat16)
    x.requires_grad_()
    graph, results = captured_step(module, x, torch.ones_like(x))
    graph.replay()
    end_of_streams()
    sound = [name for name, t in results.items() if not torch.isfinite(t).all()]
    all_here()
    if rank == 1:
        channel().give_up("by hand")
    all_here()
    graph.replay()
    end_of_streams()
    # The gradient of fc2_bias depends on this rank's own dY alone: no other rank's values are in it.
    there = {name for name, t in results.items() if not torch.isnan(t).any()} - {"fc2_bias"}
    return sound, sorted(there), met(lambda: forward(module, x))
