"""Gradients that a replay hands out without a copy, to another captured callable or to a parameter: static memory,
which somebody may still hold when the next replay writes there. Decides nothing about which are handed out so."""

import weakref
from collections.abc import Sequence

import torch

from transformer_engine.pytorch.graph.memory.buffers import Buffers, distinct


class Loans:
    """Those of the graphs in one memory pool. A gradient on loan is read by its taker's backward, which copies it in
    before it replays, and does not write to it. Where another replay comes first, or the gradient outlives that one
    (autograd holds it for a sum, a hook or torch.autograd.grad() for the user), it gets memory of its own."""

    def __init__(self) -> None:
        self.out: list[tuple[weakref.ref, object]] = []  # (gradient, taker)
        # Gradients of parameters that stand in static memory: (position of the graph that wrote it, parameter, address)
        self.grads: list[tuple[int, torch.nn.Parameter, int]] = []
        self.latest = -1  # of their positions

    def lend(self, gradient: torch.Tensor, taker: object) -> torch.Tensor:
        """taker: the captured callable whose backward reads it, known by its identity alone."""
        self.out.append((weakref.ref(gradient), taker))
        return gradient

    def settle(self, replayed: object | None = None) -> None:
        """Before a replay, of the backward of `replayed`, or of anything else."""
        left = []
        for loan in self.out:
            gradient, taker = loan[0](), loan[1]
            if gradient is None:
                continue
            if taker is replayed:
                left.append(loan)
                continue
            own = Buffers().take(gradient)
            distinct(own).copy_(distinct(gradient))
            gradient.data = own
        self.out = left

    def hand_out(self, position: int, static: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Parameters get their gradients without a copy from the graph at that position. Nothing that was captured
        behind it has their memory; what was captured before it may."""
        self.grads += [(position, parameter, grad.data_ptr()) for parameter, grad in static]
        self.latest = max(self.latest, position)

    def keep_grads(self, position: int) -> None:
        """Before a replay of the graph at that position: a .grad that is still where it may write gets memory of its
        own, and what comes is added to that."""
        left = []
        for entry in self.grads:
            at, parameter, address = entry
            if at < position:
                left.append(entry)
            elif parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad.data = parameter.grad.clone()
        self.grads, self.latest = left, max((at for at, *_ in left), default=-1)
