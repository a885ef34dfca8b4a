"""Gradients that a replay hands to another captured callable without a copy: static memory, which somebody may still
hold when the next replay writes there. Decides nothing about which are handed out so."""

import weakref
from typing import TYPE_CHECKING

import torch

from transformer_engine.pytorch.graph.buffers import Buffers, distinct

if TYPE_CHECKING:
    from transformer_engine.pytorch.graph.replay import Graphed


class Loans:
    """Those of the graphs in one memory pool. A gradient on loan is read by its taker's backward, which copies it in
    before it replays, and does not write to it. Where another replay comes first, or the gradient outlives that one
    (autograd holds it for a sum, a hook or torch.autograd.grad() for the user), it gets memory of its own."""

    def __init__(self) -> None:
        self.out: list[tuple[weakref.ref, Graphed]] = []

    def lend(self, gradient: torch.Tensor, taker: "Graphed") -> torch.Tensor:
        self.out.append((weakref.ref(gradient), taker))
        return gradient

    def settle(self, replayed: "Graphed | None" = None) -> None:
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
