"""Tracks which captured microbatches of one memory pool are in flight, and marks those whose memory a replay overwrote.

- Memory that was free when a graph was captured may be in use when it is replayed, if replays run in another order.
- No memory is moved or freed here.
"""

import weakref

import torch

from transformer_engine.pytorch._internal.torch_private import increment_version
from transformer_engine.pytorch.graph.memory.aliased_grads import AliasedGrads


class CapturedMicrobatch:
    """A captured forward with its backward. Positions count the captures of one pool, in their order.

    label: names the callable in errors.
    outputs: the tensors that the forward makes.
    end_position: where the memory that the backward reads is released; unique to this microbatch.
    wgrad_position: of its delayed weight gradients, if the order has an entry for them.
    delays_wgrad: whether it has delayed weight gradients.
    retain_graph: whether the backward may be replayed again.
    """

    __slots__ = (
        *("label", "outputs", "forward_position", "backward_position", "end_position", "wgrad_position"),
        *("delays_wgrad", "retain_graph", "overwritten_by", "wgrad_overwritten_by"),
    )

    def __init__(
        self,
        label: str,
        outputs: list[torch.Tensor],
        forward_position: int,
        backward_position: int,
        end_position: int,
        wgrad_position: int | None,
        *,
        delays_wgrad: bool,
        retain_graph: bool,
    ) -> None:
        self.label, self.outputs = label, outputs
        self.forward_position, self.backward_position = forward_position, backward_position
        self.end_position, self.wgrad_position = end_position, wgrad_position
        self.delays_wgrad, self.retain_graph = delays_wgrad, retain_graph
        # Labels of the callables that wrote over the memory read by the backward, and by the delayed weight gradients,
        # of the latest call.
        self.overwritten_by: str | None = None
        self.wgrad_overwritten_by: str | None = None


class InFlight:
    """The microbatches of one pool whose backward, or delayed weight gradients, is still to be replayed.

    - A backward's inputs are intact from the capture of the forward to the capture that reads them last; those of
      delayed weight gradients, from that backward to theirs.
    - While one is in flight, only graphs that were captured between these two positions may be replayed.
    - Sets of positions are integers used as bit sets.
    """

    def __init__(self) -> None:
        self.aliased_grads = AliasedGrads()
        self.captured = 0  # the number of positions
        self._begins = 0  # positions where the intervals in flight begin
        self._ends = 0
        # By begin position: the microbatch, the end position, and the attribute to set if it is overwritten.
        self._waiting: dict[int, tuple[CapturedMicrobatch, int | None, str]] = {}
        # Microbatches whose results a caller may hold, by position: a graph that was captured later may have got memory
        # that an earlier graph had for itself. A checkpoint's first run, which has no backward, is listed too.
        self._results: list[CapturedMicrobatch] = []

    def _overwrite_results(self, at: int) -> None:
        """Increments the versions of these results: a backward that saved one raises."""
        while self._results and self._results[-1].forward_position > at:
            increment_version(self._results.pop().outputs)

    def forward(self, microbatch: CapturedMicrobatch, has_backward: bool) -> None:
        """Called before a forward is replayed. has_backward: a backward may follow."""
        at = microbatch.forward_position
        self._overwrite_results(at)
        if not self._results or self._results[-1] is not microbatch:
            self._results.append(microbatch)
        if self._begins >> at or self._ends & ((1 << at) - 1):
            self._remove(at)
            self._remove(microbatch.backward_position)
            self._mark_overwritten(at, microbatch.label)
        if has_backward:
            microbatch.overwritten_by = None
            self._add(at, microbatch.end_position, microbatch, "overwritten_by")

    def backward(self, microbatch: CapturedMicrobatch) -> None:
        at = microbatch.backward_position
        self._overwrite_results(at)
        if self._begins >> at or self._ends & ((1 << at) - 1):
            self._remove(at)  # a backward that runs again produces its delayed weight gradients again
            self._mark_overwritten(at, microbatch.label)
        if not microbatch.retain_graph:
            self._remove(microbatch.forward_position)
        if microbatch.delays_wgrad:
            microbatch.wgrad_overwritten_by = None
            self._add(at, microbatch.wgrad_position, microbatch, "wgrad_overwritten_by")

    def weight_grads(self, microbatch: CapturedMicrobatch) -> None:
        at = microbatch.wgrad_position
        self._remove(microbatch.backward_position)
        if at is not None:
            self._overwrite_results(at)
        if at is not None and (self._begins >> at or self._ends & ((1 << at) - 1)):
            self._mark_overwritten(at, microbatch.label)

    def _add(self, begin: int, end: int | None, microbatch: CapturedMicrobatch, mark: str) -> None:
        self._waiting[begin] = microbatch, end, mark
        self._begins |= 1 << begin
        if end is not None:
            self._ends |= 1 << end

    def _remove(self, begin: int) -> None:
        left = self._waiting.pop(begin, None)
        if left is not None:
            self._begins &= ~(1 << begin)
            if left[1] is not None:
                self._ends &= ~(1 << left[1])

    def _mark_overwritten(self, at: int, label: str) -> None:
        for begin, (microbatch, end, mark) in list(self._waiting.items()):
            if begin > at or (end is not None and end < at):
                setattr(microbatch, mark, label)
                self._remove(begin)


_of_pools: weakref.WeakValueDictionary[object, InFlight] = weakref.WeakValueDictionary()


def in_flight_of(pool: object | None) -> InFlight:
    """The tracker of a pool that several captures share, or a new one."""
    if pool is None:
        return InFlight()
    in_flight = _of_pools.get(pool)
    if in_flight is None:
        in_flight = _of_pools[pool] = InFlight()
    return in_flight
