"""Gradients that a replay hands out without a copy: they alias static memory, and are copied before it is overwritten.

- The consumer of an aliased gradient is another captured callable, or a parameter.
- Which gradients are aliased is decided by the capture and by Graphed.consumer_of, not here.
"""

import weakref
from collections.abc import Sequence

import torch

from transformer_engine.pytorch.graph.memory.buffers import BufferPool, unexpanded


class AliasedGrads:
    """The aliased gradients of the graphs in one memory pool.

    - The consumer's backward copies an aliased gradient in before it replays, and does not write to it.
    - Where another replay comes first, or the gradient outlives that one (autograd holds it for a sum, a hook or the
      caller of torch.autograd.grad()), it gets memory of its own.
    """

    def __init__(self) -> None:
        self.input_grads: list[tuple[weakref.ref, object]] = []  # (gradient, consumer)
        self.param_grads: list[tuple[int, torch.nn.Parameter, int]] = []  # (position of the graph, parameter, address)
        self.last_position = -1  # the largest position in param_grads

    def alias(self, gradient: torch.Tensor, consumer: object) -> torch.Tensor:
        """consumer: the captured callable whose backward reads the gradient, compared by identity."""
        self.input_grads.append((weakref.ref(gradient), consumer))
        return gradient

    def copy_out(self, replayed: object | None = None) -> None:
        """Before a replay of the backward of `replayed`, or of any other graph: copies what it does not consume."""
        left = []
        for entry in self.input_grads:
            gradient, consumer = entry[0](), entry[1]
            if gradient is None:
                continue
            if consumer is replayed:
                left.append(entry)
                continue
            own = BufferPool().acquire(gradient)
            unexpanded(own).copy_(unexpanded(gradient))
            gradient.data = own
        self.input_grads = left

    def alias_param_grads(self, position: int, static: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        """Parameters get their gradients without a copy from the graph at `position`. Graphs that were captured after
        it do not use that memory; graphs that were captured before it may."""
        self.param_grads += [(position, parameter, grad.data_ptr()) for parameter, grad in static]
        self.last_position = max(self.last_position, position)

    def copy_out_param_grads(self, position: int) -> None:
        """Before a replay of the graph at `position`: a .grad that still aliases memory that the graph may write is
        copied, and later gradients are added to the copy."""
        left = []
        for entry in self.param_grads:
            at, parameter, address = entry
            if at < position:
                left.append(entry)
            elif parameter.grad is not None and parameter.grad.data_ptr() == address:
                parameter.grad.data = parameter.grad.clone()
        self.param_grads, self.last_position = left, max((at for at, *_ in left), default=-1)
