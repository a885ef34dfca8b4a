"""Memory that tensor parallelism holds for received data: pooled buffers of calls (csrc/core/comm_buffer_pool.h), and
slots that peers push to (csrc/distributed/peer.h)."""

from typing import NamedTuple

import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.distributed.peer import channels_of


class CommUsage(NamedTuple):
    """bytes: of all slots; slots: their number; leased: the number that calls use at present."""

    bytes: int
    slots: int
    leased: int


def comm_usage(group: dist.ProcessGroup | None = None) -> CommUsage:
    """The slots in which layers over `group` (None: the default one) receive the rows that they gather and add up.

    They grow to the largest call and do not depend on the number of layers; te.destroy_ub() frees those that no call
    uses, except slots that peers push to. Errors: TypeError unless it is a group, RuntimeError for a destroyed one.
    """
    if ranks_of("comm_usage", "group", group) == 1:
        return CommUsage(0, 0, 0)
    return usage_by_name((dist.group.WORLD if group is None else group).group_name)


def usage_by_name(name: str) -> CommUsage:
    each = [_C.comm_buffer_usage(name), *(channel.usage() for channel in channels_of(name))]
    return CommUsage(*(sum(numbers) for numbers in zip(*each, strict=True)))
