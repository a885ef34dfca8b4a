"""What a capture leaves of one pass: its graphs, each with the static tensors that it reads and writes and with what is
done around its replay. Frozen: what changes from call to call is in calls.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.backend.interface import Graph
from transformer_engine.pytorch.graph.recorded.main_grads import Fused
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardGraph:
    graph: Graph
    replay: Callable[[], None]  # of the graph, without a frame of Python between
    events: frozenset  # the handles of those that it records
    inputs: list[torch.Tensor]
    addresses: list[int]  # of the inputs
    near: tuple[int, int]  # where what overlaps an input begins
    written: list[int]  # inputs that it writes to
    outputs: list[torch.Tensor]
    constant_outputs: list[int]  # which want no gradient
    writes: list[torch.Tensor]  # what its replay writes to without torch's counting it
    guarded_inputs: list[int]  # which, and which outputs, nobody may write to before the backward
    guarded_results: list[int]
    form: pytree.TreeSpec  # of the result
    single: bool  # it is one tensor
    result: list[object]  # its leaves; None where a tensor stands
    is_tensor: list[bool]

    def assemble(self, outputs: tuple[torch.Tensor, ...]) -> object:
        tensors = iter(outputs)
        return self.form.unflatten(next(tensors) if t else leaf for t, leaf in zip(self.is_tensor, self.result))

    def drop(self) -> None:
        """The graph and its memory; what is left refuses nothing by itself."""
        _drop(self.graph, self.inputs, self.outputs, self.writes)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BackwardGraph:
    graph: Graph
    replay: Callable[[], None]
    events: frozenset
    grad_outputs: list[torch.Tensor | None]
    grad_addresses: list[int]
    near: tuple[int, int]  # where what overlaps an incoming gradient begins
    grad_inputs: list[torch.Tensor | None]  # of the wanted inputs
    grad_parameters: list[torch.Tensor | None]
    copied: list[bool]  # which of the parameters' are handed out as copies
    copied_grads: list[torch.Tensor]  # those
    static_grads: list[tuple[torch.nn.Parameter, torch.Tensor]]  # the others, which are handed out without a copy
    writes: list[torch.Tensor]
    guarded_held: list[torch.Tensor]  # parameters and buffers that it reads
    fused: list[Fused]  # whose gradients it adds to main_grad
    keeps: bool  # it may run again
    next_position: int  # of the backward that was captured behind it, among the captures; -1: takes no gradient of it

    def drop(self) -> None:
        _drop(self.graph, self.grad_outputs, self.grad_inputs, self.grad_parameters, self.copied_grads)
        _clear(self.static_grads, self.writes)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WeightGradGraph:
    """Of the weight gradients that backward_dw() is asked for."""

    graph: Graph
    position: int  # where it was captured, whether or not the order has an entry for it
    grads: list[tuple[torch.nn.Parameter, torch.Tensor]]
    static_grads: list[tuple[torch.nn.Parameter, torch.Tensor]]  # of these, those handed out without a copy
    fused: list[Fused]  # whose gradients it adds to main_grad
    modules: list[TransformerEngineBaseModule]  # that left them
    parameters: frozenset[int]  # by id
    held: list[object]  # what it reads, where it may run at any time

    def drop(self) -> None:
        _drop(self.graph, self.grads, self.static_grads, self.held)


def _clear(*tensors: list) -> None:
    for some in tensors:
        some.clear()


def _drop(graph: Graph, *tensors: list) -> None:
    graph.reset()
    _clear(*tensors)
