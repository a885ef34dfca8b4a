# Several groups at work over channels to peers (ranks.py starts them). No test here: each worker returns what differs
# from the same layers over the group, as words.
import threading

import torch
import torch.distributed as dist
from ranks import on_cuda

from transformer_engine.pytorch import _C

from .peer_graph_workers import whole_steps
from .peer_workers import different, example, made, same_bits, step

STEPS, TOKENS = 12, 64


def pairs_over(groups, dtype):
    """(chunked, serial) of each group."""
    found = []
    for number, group in enumerate(groups):
        kind = ("mlp", "column")[number % 2]
        pair = [made(kind, overlap, dtype, tp_group=group) for overlap in ("chunked", "off")]
        found.append((kind, *pair))
    return found


def threads_of_two_groups(rank):
    """On the CPU: a thread for each of two groups, each in an order of its own."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    before = _C.set_cpu_products("loop")
    layers = pairs_over(groups, torch.float32)
    given = [[example(kind, rank, torch.float32, TOKENS, n) for n in range(STEPS)] for kind, *_ in layers]
    wanted = [[step(serial, x) for x in xs] for (_, _, serial), xs in zip(layers, given)]
    found = [[] for _ in layers]

    def work(number):
        found[number] += [step(layers[number][1], x) for x in given[number]]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(layers))]
    for thread in threads if rank == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    _C.set_cpu_products(before)
    wrong = [f"group {i}: {len(each)} steps" for i, each in enumerate(found) if len(each) != STEPS]
    for i, (each, right) in enumerate(zip(found, wanted)):
        for n, pair in enumerate(zip(each, right)):
            wrong += different(f"group {i}, step {n}", *pair)
    return wrong


def streams_of_two_groups(rank):
    """On CUDA: a stream for each of two groups, calls of both between each other, in one order on all ranks."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    layers = pairs_over(groups, torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in groups]
    given = [[example(kind, rank, torch.bfloat16, TOKENS, n) for n in range(STEPS)] for kind, *_ in layers]
    wanted = [[step(serial, x) for x in xs] for (_, _, serial), xs in zip(layers, given)]
    torch.cuda.synchronize()
    found = [[] for _ in layers]
    for n in range(STEPS):
        for stream, layer, xs, each in zip(streams, layers, given, found):
            with torch.cuda.stream(stream):
                each.append(step(layer[1], xs[n]))
    torch.cuda.synchronize()
    wrong = []
    for i, (each, right) in enumerate(zip(found, wanted)):
        for n, pair in enumerate(zip(each, right)):
            wrong += different(f"group {i}, step {n}", *pair)
    return wrong


def two_groups(rank):
    return streams_of_two_groups(rank) if on_cuda() else threads_of_two_groups(rank)


def crossing_groups(rank):
    """Four ranks in rows and in columns: a layer over either, one after the other."""
    rows, columns = ([dist.new_group(list(ranks)) for ranks in each] for each in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    before = _C.set_cpu_products("loop")
    layers = pairs_over((rows[rank // 2], columns[rank % 2]), torch.float32)
    wrong = []
    for n in range(STEPS):
        for i, (kind, chunked, serial) in enumerate(layers):
            x = example(kind, rank, torch.float32, TOKENS, n)
            wrong += different(f"{('row', 'column')[i]} {kind} {n}", step(chunked, x), step(serial, x))
    _C.set_cpu_products(before)
    return wrong


def on_few_queues(rank):
    """Results that could depend on CUDA_DEVICE_MAX_CONNECTIONS."""
    return [*same_bits(rank, torch.bfloat16)[0], *whole_steps(rank, 40), *streams_of_two_groups(rank)]
