# Channels to peers while groups come and go, and where memory cannot be shared. No test here: each worker returns what
# it found.
import os

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C, distributed
from transformer_engine.pytorch.distributed import peer

from .peer_workers import different, example, made, memory_of_channels, step

TOKENS = 32


def groups_that_come_and_go(rank):
    """Several groups that are used and destroyed: the memory of each while it lives, the memory that is left after it,
    and threads."""
    found = []
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        module = made("mlp", "chunked", torch.float32, tp_group=group)
        step(module, example("mlp", rank, torch.float32, TOKENS))
        alive = memory_of_channels()
        dist.destroy_process_group(group)
        del module, group
        found.append((alive, memory_of_channels(), len(os.listdir("/proc/self/task"))))
    return found


def another_group_of_the_name(rank, folder, holds):
    """A module through a group that fails, is destroyed, and is made again with the ranks in another order. holds: a
    reference to the first group is kept."""
    held = dist.group.WORLD if holds else None
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
    del held
    return words, [key for key in wanted if not torch.allclose(wanted[key], got[key], atol=1e-5)]


def no_space(rank, when):
    """The error of all ranks after one rank has no space, whether the next call is correct, and the memory of channels:
    after the error, after that call, and after the group."""
    real, calls = os.posix_fallocate, []

    def full(*args):
        calls.append(args)
        if rank == 0 and len(calls) == when:
            raise OSError(28, "No space left on device")
        return real(*args)

    os.posix_fallocate = full
    group = dist.new_group(list(range(dist.get_world_size())))
    module = made("column", "chunked", torch.float32, tp_group=group)
    x = example("column", rank, torch.float32, TOKENS)
    words = ""
    try:
        step(module, x)
    except RuntimeError as error:
        words = str(error)
    memory = [memory_of_channels()]
    if when < 3:  # in a backward the forward's call is given up
        step(module, x)
    memory.append(memory_of_channels())
    dist.destroy_process_group(group)
    del module, group
    return words, [*memory, memory_of_channels()]


def no_access(rank, overlap):
    """Rank 1 alone finds that devices do not reach each other: what is raised, and what differs from serial where
    nothing is."""
    if rank == 1:
        peer._Meeting._no_access = lambda meeting: "rank 1 sees no other"
    kind, x = peer.kind_of(torch.device("cpu")), example("column", rank, torch.float32, TOKENS)
    _C.lend_comm_costs(kind, {})
    serial, module = made("column", "off", torch.float32), made("column", overlap, torch.float32)
    words, got, wanted = "", None, step(serial, x)
    try:
        got = step(module, x)
    except NotImplementedError as error:
        words = str(error)
    return words, different("serial", got, wanted) if got else []


def collected_meanwhile(rank):
    """The differences from serial in a first call during which groups without other references are collected."""
    x = example("column", rank, torch.float32, TOKENS)
    serial = made("column", "off", torch.float32)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    modules = [made("column", "chunked", torch.float32, tp_group=group) for group in groups]
    for module in modules[:2]:
        step(module, x)
    real, first, second = peer.has_met, *(group.group_name for group in groups[:2])

    def has_met(group, device):
        if len(groups) == 3 and group == first:  # of those that are gone through the other one comes next
            dist.destroy_process_group(groups.pop(1))
        return real(group, device)

    peer.has_met = has_met
    got = step(modules[2], x)
    return different("serial", got, step(serial, x)) + [key for key in peer._channels if key[0] == second]
