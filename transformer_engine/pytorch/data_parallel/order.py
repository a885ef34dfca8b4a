"""One order of collectives on all ranks: that of gradients, which is the groups' own until the first step has shown in
which they become ready, and that of weights. A group that is ready early waits for those before it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Protocol


class Group(Protocol):
    """The part of a BucketGroup that an order uses."""

    is_stale: bool
    last_ready: int
    is_gathering: bool
    next_param_gather_bucket_group: Any
    chain: Any

    def is_ready(self) -> bool: ...

    def start_grad_sync(self, force_all_reduce: bool = False) -> None: ...

    def start_param_sync(self, force_sync: bool = False) -> None: ...

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None: ...


class DispatchOrder:
    """In which gradients are reduced. measured(): in which groups were last ready; made common by agree()."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.order = list(range(len(self.groups)))
        self.lock = threading.Lock()  # hooks run on the threads of several devices
        self._next = 0
        self.chains: list[GatherChain] = []

    def measured(self) -> list[int]:
        """Numbers of groups. Those that no parameter was ready of come last."""
        last = [group.last_ready for group in self.groups]
        return sorted(self.order, key=lambda i: (not last[i], last[i]))

    def agree(self, order: Sequence[int]) -> None:
        self.order = list(order)

    def begin(self) -> None:
        """A step begins."""
        self._next = 0

    def start_ready(self) -> None:
        """Starts each group that is ready while all before it have started."""
        while self._next < len(self.order):
            group = self.groups[self.order[self._next]]
            if not group.is_ready():
                return
            self.start_gathers()
            group.start_grad_sync()
            self._next += 1

    def start_rest(self, force_all_reduce: bool = False) -> None:
        self.start_gathers()
        for i in self.order:
            self.groups[i].start_grad_sync(force_all_reduce)
        self._next = len(self.order)

    def start_gathers(self) -> None:
        """Before the first reduction: starts the gathers that no forward has started. Ranks may skip different parts of
        the module; their collectives are in one order all the same."""
        if self._next == 0:
            for chain in self.chains:
                chain.start_up_to(chain.groups[-1])


class GatherChain:
    """In which weights are gathered: a group starts the next one when it is waited for, a forward as many as it has
    waited for. common: the groups of all communicators in one order. A rank that waits for a group has started all
    before it, also those of another communicator: a rank that uses other parts of the module may wait for one of
    them."""

    def __init__(self, groups: Sequence[Group], common: Sequence[Group]) -> None:
        self.groups, self.common = list(groups), list(common)
        self.shares_order = len(self.common) > len(self.groups)  # with groups of other communicators
        self._place = {id(group): i for i, group in enumerate(self.groups)}
        for group, following in zip(self.groups, [*self.groups[1:], None]):
            group.chain, group.next_param_gather_bucket_group = self, following

    def start_up_to(self, last: Group) -> None:
        """Starts what is stale, in the common order, up to that group."""
        for group in self.common:
            if group.is_stale and not group.is_gathering:
                group.start_param_sync()
            if group is last:
                return

    def start(self, group: Group) -> None:
        """Starts a group ahead of the forward that reads it. Those before it in its own chain are under way."""
        if self.shares_order:
            self.start_up_to(group)
        else:
            group.start_param_sync()

    def start_first(self) -> None:
        """Starts the first group that is stale, on all ranks after a step: nothing else has to start before it."""
        for group in self.groups:
            if group.is_stale and not group.is_gathering:
                group.start_param_sync()
                return

    def start_following(self, read: Sequence[Group]) -> None:
        """Starts as many groups after these as they are: the next forward, which may read as many, finds them under
        way."""
        self._start_after(max(self._place[id(group)] for group in read), len(read))

    def _start_after(self, place: int, count: int) -> None:
        for group in itertools.islice(self.groups, place + 1, None):
            if group.is_stale and not group.is_gathering:
                self.start(group)
                count -= 1
                if count == 0:
                    return

    def finish(self) -> None:
        """Starts all that is stale before it waits for the first: all weights are whole afterwards."""
        self.start_up_to(self.groups[-1])
        for group in self.groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_for(read: Sequence[Group]) -> None:
    """Makes the groups whole that a forward reads. Their gathers all start before the first is waited for."""
    stale = [group for group in read if group.is_stale]
    for group in stale:
        # Of one communicator all gathers before one that is under way have started.
        if not group.is_gathering or group.chain.shares_order:
            group.chain.start_up_to(group)
    for group in read:
        group.finish_param_sync(skip_next_bucket_dispatch=True)
    for chain in {id(group.chain): group.chain for group in stale}.values():
        chain.start_following([group for group in stale if group.chain is chain])
