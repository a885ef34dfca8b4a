"""Which passes of graphs in one memory pool are under way. A replay may write to memory that held nothing when it was
captured; a pass that has it now, because replays come in another order, is marked. Moves and frees nothing."""

import weakref

import torch

from transformer_engine.pytorch._internal.torch_private import increment_version
from transformer_engine.pytorch.graph.memory.loans import Loans


class Pass:
    """A captured forward with its backward. Positions are those of the captures, in their order.

    label: of the callable; made: its results; end_position: where what the backward reads is given up, no other pass
    has the same; wgrad_position: of its delayed weight gradients, where the order has an entry for them; delays: it has
    some; keeps: a backward leaves everything as it is, for another one."""

    __slots__ = (
        *("label", "made", "forward_position", "backward_position", "end_position", "wgrad_position"),
        *("delays", "keeps", "spoilt_by", "wgrad_spoilt_by"),
    )

    def __init__(
        self,
        label: str,
        made: list[torch.Tensor],
        forward_position: int,
        backward_position: int,
        end_position: int,
        wgrad_position: int | None,
        *,
        delays: bool,
        keeps: bool,
    ) -> None:
        self.label, self.made = label, made
        self.forward_position, self.backward_position = forward_position, backward_position
        self.end_position, self.wgrad_position = end_position, wgrad_position
        self.delays, self.keeps = delays, keeps
        self.spoilt_by: str | None = None  # what wrote over that which the latest call's backward reads
        self.wgrad_spoilt_by: str | None = None  # and which its delayed weight gradients read


class Flight:
    """What a backward reads is its pass's own between the captures of the forward and of what reads it last; what its
    delayed weight gradients read, from that backward to theirs. So nothing else may be replayed while one of these
    waits than what was captured in between. Sets of positions are the bits of integers."""

    def __init__(self) -> None:
        self.loans = Loans()
        self.captured = 0  # how many positions there are
        self._begins = 0  # of what waits
        self._ends = 0
        # By where it begins: the pass, where it ends, and what is set where it is spoilt.
        self._waiting: dict[int, tuple[Pass, int | None, str]] = {}
        # Whose results somebody may have, by position: one that was captured later may have got memory that an earlier
        # graph had for itself alone. Passes that nobody is to come back to (a checkpoint's first run) are here too.
        self._results: list[Pass] = []

    def _overwrite_results(self, at: int) -> None:
        """What saved one for its backward says so there."""
        while self._results and self._results[-1].forward_position > at:
            increment_version(self._results.pop().made)

    def forward(self, one: Pass, returns: bool) -> None:
        """Its forward is replayed; `returns`: a backward may follow."""
        at = one.forward_position
        self._overwrite_results(at)
        if not self._results or self._results[-1] is not one:
            self._results.append(one)
        if self._begins >> at or self._ends & ((1 << at) - 1):
            self._leave(at)
            self._leave(one.backward_position)
            self._spoil(at, one.label)
        if returns:
            one.spoilt_by = None
            self._wait(at, one.end_position, one, "spoilt_by")

    def backward(self, one: Pass) -> None:
        at = one.backward_position
        self._overwrite_results(at)
        if self._begins >> at or self._ends & ((1 << at) - 1):
            self._leave(at)  # one that runs again leaves its weight gradients anew
            self._spoil(at, one.label)
        if not one.keeps:
            self._leave(one.forward_position)
        if one.delays:
            one.wgrad_spoilt_by = None
            self._wait(at, one.wgrad_position, one, "wgrad_spoilt_by")

    def weight_grads(self, one: Pass) -> None:
        at = one.wgrad_position
        self._leave(one.backward_position)
        if at is not None:
            self._overwrite_results(at)
        if at is not None and (self._begins >> at or self._ends & ((1 << at) - 1)):
            self._spoil(at, one.label)

    def _wait(self, begin: int, end: int | None, one: Pass, mark: str) -> None:
        self._waiting[begin] = one, end, mark
        self._begins |= 1 << begin
        if end is not None:
            self._ends |= 1 << end

    def _leave(self, begin: int) -> None:
        left = self._waiting.pop(begin, None)
        if left is not None:
            self._begins &= ~(1 << begin)
            if left[1] is not None:
                self._ends &= ~(1 << left[1])

    def _spoil(self, at: int, label: str) -> None:
        for begin, (one, end, mark) in list(self._waiting.items()):
            if begin > at or (end is not None and end < at):
                setattr(one, mark, label)
                self._leave(begin)


_of_pools: weakref.WeakValueDictionary[object, Flight] = weakref.WeakValueDictionary()


def flight_of(pool: object | None) -> Flight:
    """The one of a pool that several captures share, or a new one."""
    if pool is None:
        return Flight()
    flight = _of_pools.get(pool)
    if flight is None:
        flight = _of_pools[pool] = Flight()
    return flight
