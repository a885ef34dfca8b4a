"""Which passes of graphs in one memory pool are under way. A replay may write to memory that held nothing when it was
captured; a pass that has it now, because replays come in another order, is marked. Moves and frees nothing."""

import weakref
from typing import Protocol


class Pass(Protocol):
    """A captured forward with its backward. Positions are those of the captures, in their order."""

    label: str
    forward_position: int
    backward_position: int
    end_position: int  # where what the backward reads is given up
    wgrad_position: int | None  # of its delayed weight gradients, where the order has an entry for them
    wgrad_graph: object | None
    keeps: bool  # a backward leaves everything as it is, for another one
    spoilt_by: str | None


class Flight:
    """A pass's memory is its own between the captures of its forward and of what reads it last. So nothing else may be
    replayed while it is under way than what was captured in between. Sets of positions are the bits of integers."""

    def __init__(self) -> None:
        self.captured = 0  # how many positions there are
        self._started = 0  # forwards of passes under way
        self._ends = 0  # what reads them last, where memory is given up behind it
        self._passes: dict[int, Pass] = {}  # by their forward's position

    def forward(self, one: Pass, returns: bool) -> None:
        """Its forward is replayed; `returns`: a backward may follow."""
        at = one.forward_position
        if self._started >> at or self._ends & ((1 << at) - 1):
            self._leave(one)
            self._spoil(at, one.label)
        if returns:
            one.spoilt_by = None
            self._passes[at] = one
            self._started |= 1 << at
            self._ends |= 1 << one.end_position

    def backward(self, one: Pass) -> None:
        at = one.backward_position
        if self._started >> at or self._ends & ((1 << at) - 1):
            self._spoil(at, one.label)
        if one.keeps:
            return
        self._ends &= ~(1 << one.end_position)
        if one.wgrad_graph is None:
            self._leave(one)
        elif one.wgrad_position is not None:
            self._ends |= 1 << one.wgrad_position

    def weight_grads(self, one: Pass) -> None:
        at = one.wgrad_position
        if at is not None and (self._started >> at or self._ends & ((1 << at) - 1)):
            self._spoil(at, one.label)
        self._leave(one)

    def _leave(self, one: Pass) -> None:
        if self._passes.pop(one.forward_position, None) is not None:
            self._started &= ~(1 << one.forward_position)
            self._ends &= ~(1 << one.end_position)
            if one.wgrad_position is not None:
                self._ends &= ~(1 << one.wgrad_position)

    def _spoil(self, at: int, label: str) -> None:
        for one in list(self._passes.values()):
            ends = {one.end_position, one.wgrad_position} - {None}
            if one.forward_position > at or any(end < at and self._ends >> end & 1 for end in ends):
                one.spoilt_by = label
                self._leave(one)


_of_pools: weakref.WeakValueDictionary[object, Flight] = weakref.WeakValueDictionary()


def flight_of(pool: object | None) -> Flight:
    """The one of a pool that several captures share, or a new one."""
    if pool is None:
        return Flight()
    flight = _of_pools.get(pool)
    if flight is None:
        flight = _of_pools[pool] = Flight()
    return flight
