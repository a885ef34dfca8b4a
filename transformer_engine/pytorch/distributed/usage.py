"""Memory that tensor parallelism holds for receiving: pooled buffers of calls (csrc/core/comm_buffer_pool.h), and slots
that peers push to (csrc/distributed/peer.h)."""

from typing import NamedTuple

import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.distributed.peer import channels_of


class CommUsage(NamedTuple):
    """bytes: of all slots; slots: how many there are; leased: how many of them a call has just now."""

    bytes: int
    slots: int
    leased: int


def comm_usage(group: dist.ProcessGroup | None = None) -> CommUsage:
    """The slots in which layers over `group` (None: the default one) receive what they gather and add up.

    They grow to the largest call and do not depend on the number of layers; te.destroy_ub() frees those that nobody
    has, but for what peers push to. Errors: TypeError for what is no group, RuntimeError for one that was destroyed.
    """
    if ranks_of("comm_usage", "group", group) == 1:
        return CommUsage(0, 0, 0)
    return usage_by_name((dist.group.WORLD if group is None else group).group_name)


def usage_by_name(name: str) -> CommUsage:
    each = [_C.lease_usage(name), *(channel.usage() for channel in channels_of(name))]
    return CommUsage(*(sum(numbers) for numbers in zip(*each, strict=True)))
