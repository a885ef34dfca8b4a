# Channels to peers while groups come and go, and where memory cannot be shared. No test here: each worker returns what
# it found.
import contextlib
import gc
import os

import torch
import torch.distributed as dist
from peer_workers import example, made, step

from transformer_engine.pytorch import distributed

TOKENS = 32


def shared_memory():
    """Threads of this process, and how much memory of channels it maps."""
    with open("/proc/self/maps") as file:
        return len(os.listdir("/proc/self/task")), sum("memfd:te_peer" in line for line in file)


def descriptors():
    """Of memory of channels, which only need one until all ranks map it."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of this listing
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if "te_peer" in link]


def groups_that_come_and_go(rank):
    """Both counts with each of several groups that were used, and behind its end."""
    found = []
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        module = made("mlp", "chunked", torch.float32, tp_group=group)
        step(module, example("mlp", rank, torch.float32, TOKENS))
        there = shared_memory()
        dist.destroy_process_group(group)
        del module, group
        gc.collect()
        found.append((there, shared_memory()))
    return found


def another_group_of_the_name(rank, folder):
    """A module through a group that fails, is destroyed, and is made again with the ranks in another order."""
    serial, module = made("column", "off", torch.float32), made("column", "chunked", torch.float32)
    x = example("column", rank, torch.float32, TOKENS)
    step(module, x)
    if rank == 0:
        distributed.peer.channels_of(dist.group.WORLD.group_name)[0].give_up("by hand")
    dist.barrier()
    words = []
    for _ in range(2):
        try:
            step(module, x)
        except RuntimeError as error:
            words.append(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
    ranks = 2
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=1 - rank, world_size=ranks)
    wanted, got = step(serial, x), step(module, x)
    return words, [key for key in wanted if not torch.allclose(wanted[key], got[key], atol=1e-5)]


def no_space(rank, when):
    """What one rank's lack of space says to all, and whether the next call is sound."""
    real, calls = os.posix_fallocate, []

    def full(*args):
        calls.append(args)
        if rank == 0 and len(calls) == when:
            raise OSError(28, "No space left on device")
        return real(*args)

    os.posix_fallocate = full
    module = made("column", "chunked", torch.float32)
    x = example("column", rank, torch.float32, TOKENS)
    words = ""
    try:
        step(module, x)
    except RuntimeError as error:
        words = str(error)
    if when < 3:  # in a backward the forward's call is given up
        step(module, x)
    return words, descriptors()
