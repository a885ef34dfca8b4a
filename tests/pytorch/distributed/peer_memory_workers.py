# The memory that ranks of a channel share: when it is made, how it is counted, when it is freed (ranks.py starts the
# ranks). No test here: each worker returns what it found.
import gc

import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed.peer import channels_of

from .peer_workers import HIDDEN, different, example, made, step

SMALL, LARGE = 32, 512  # tokens of a rank


def forward(module, x):
    with torch.no_grad():
        return module(x)


def reserved(rank):
    """Usage after a first small call and after a later larger one, with a note of initialize_ub and without."""
    found = []
    for told in (False, True):
        group = dist.new_group([0, 1])
        if told:
            te.initialize_ub([2 * LARGE * 2, HIDDEN], 2, dtype=torch.float32)
        module = made("mlp", "chunked", torch.float32, tp_group=group)
        each = []
        for tokens in (SMALL, LARGE):
            forward(module, example("mlp", rank, torch.float32, tokens))
            each.append(tuple(distributed.comm_usage(group)))
        found.append(each)
        te.destroy_ub()
    return found


def planned(rank):
    """The arenas of te.memory_plan, what the channel has, and what the group has."""
    module = made("mlp", "chunked", torch.float32)
    plan = te.memory_plan(module, example("mlp", rank, torch.float32, SMALL).requires_grad_())
    arenas = [row.bytes for row in plan.rows if row.status == "arena"]
    (channel,) = channels_of(dist.group.WORLD.group_name)
    return arenas, channel.usage()[0], distributed.comm_usage().bytes


def refused(module, x):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            forward(module, x)
    except RuntimeError as error:
        return str(error)
    return "captured"


def grows_in_a_capture(rank):
    """The errors of a capture before the ranks have met and of a larger call, and the differences of eager calls
    afterwards."""
    serial, module = made("column", "off", torch.bfloat16), made("column", "chunked", torch.bfloat16)
    small, large = (example("column", rank, torch.bfloat16, tokens) for tokens in (SMALL, LARGE))
    words = [refused(module, small)]
    step(module, small)
    words.append(refused(module, large))
    return words, different("after the captures", step(module, large), step(serial, large))


def channels_of_dead_groups(rank, captured):
    """The number of channels of destroyed groups, after each of several such groups."""
    found, graphs = [], []
    for _ in range(4):
        group = dist.new_group([0, 1])
        module = made("mlp", "chunked", torch.bfloat16, tp_group=group)
        x = example("mlp", rank, torch.bfloat16, SMALL)
        step(module, x)
        torch.cuda.synchronize()
        if captured:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                forward(module, x)
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group(group)
        del module, group
        gc.collect()
        found.append(len(distributed.peer._outlived))
    return found
