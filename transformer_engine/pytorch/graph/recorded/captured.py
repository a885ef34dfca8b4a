"""The record of one captured microbatch: its graphs with their static tensors, and what changes from call to call.

- The graph records are frozen.
- CallState and Validity are written by replay/graphed.py and the parts of Graphed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.backend.interface import Graph
from transformer_engine.pytorch.graph.recorded.main_grads import FusedWeight
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardGraph:
    graph: Graph
    replay: Callable[[], None]  # of the graph, without a Python frame in between
    events: frozenset  # handles of the events that it records
    inputs: list[torch.Tensor]
    input_addresses: list[int]
    overlap_range: tuple[int, int]  # addresses at which a tensor may overlap an input
    mutated_inputs: list[int]  # inputs that it writes to
    outputs: list[torch.Tensor]
    non_differentiable_outputs: list[int]
    version_bumps: list[torch.Tensor]  # tensors that its replay writes, whose versions the replay has to increment
    guarded_inputs: list[int]  # inputs that the caller must not write to before the backward
    guarded_results: list[int]  # outputs that the caller must not write to before the backward
    result_spec: pytree.TreeSpec
    returns_one_tensor: bool
    result_leaves: list[object]  # None at the place of each tensor
    is_tensor: list[bool]

    def assemble(self, outputs: tuple[torch.Tensor, ...]) -> object:
        """The result of the call, from its tensors."""
        tensors = iter(outputs)
        leaves = (next(tensors) if t else leaf for t, leaf in zip(self.is_tensor, self.result_leaves))
        return self.result_spec.unflatten(leaves)

    def drop(self) -> None:
        """Resets the graph and releases its memory."""
        _drop(self.graph, self.inputs, self.outputs, self.version_bumps)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BackwardGraph:
    graph: Graph
    replay: Callable[[], None]
    events: frozenset
    grad_outputs: list[torch.Tensor | None]
    grad_addresses: list[int]
    overlap_range: tuple[int, int]  # addresses at which a tensor may overlap an incoming gradient
    grad_inputs: list[torch.Tensor | None]  # of the inputs that require one
    grad_parameters: list[torch.Tensor | None]
    copied: list[bool]  # whether each parameter's gradient is handed out as a copy
    copied_grads: list[torch.Tensor]
    static_grads: list[tuple[torch.nn.Parameter, torch.Tensor]]  # handed out without a copy
    version_bumps: list[torch.Tensor]
    guarded_module_tensors: list[torch.Tensor]  # parameters and buffers that it reads
    fused: list[FusedWeight]  # weights whose gradients it adds to main_grad
    retain_graph: bool  # it may be replayed again
    next_backward_position: int  # of the backward captured next, which may use its gradients; -1: it uses none

    def drop(self) -> None:
        _drop(self.graph, self.grad_outputs, self.grad_inputs, self.grad_parameters, self.copied_grads)
        _clear(self.static_grads, self.version_bumps)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WeightGradGraph:
    """The graph of the weight gradients that backward_dw() computes."""

    graph: Graph
    position: int  # where it was captured, whether or not the order has an entry for it
    grads: list[tuple[torch.nn.Parameter, torch.Tensor]]
    static_grads: list[tuple[torch.nn.Parameter, torch.Tensor]]  # a subset of grads, handed out without a copy
    fused: list[FusedWeight]  # weights whose gradients it adds to main_grad
    modules: list[TransformerEngineBaseModule]  # modules whose weight gradients are delayed
    parameters: frozenset[int]  # by id
    kept_alive: list[object]  # what it reads, if it may be replayed at any time

    def drop(self) -> None:
        _drop(self.graph, self.grads, self.static_grads, self.kept_alive)


def _clear(*tensors: list) -> None:
    for some in tensors:
        some.clear()


def _drop(graph: Graph, *tensors: list) -> None:
    graph.reset()
    _clear(*tensors)


class CallState:
    """The state of a captured callable that changes from call to call."""

    __slots__ = (
        *("all_inputs_copied", "backward_id", "forward_id", "mode_mismatches", "pending_wgrad", "ran_eager"),
        *("wait_for_graph", "warned_autocast"),
    )

    def __init__(self) -> None:
        self.forward_id = 0  # the number of forward replays: only the latest one can have a backward
        self.backward_id = 0  # the forward_id of the latest backward
        self.all_inputs_copied = False  # no argument of the latest call was a static input itself
        self.wait_for_graph = False  # the call waits for the whole graph, even if the caller passed an event
        self.pending_wgrad: tuple | None = None  # for backward_dw(): (stream, first microbatch, unwanted parameters)
        self.ran_eager = False  # the latest call ran without the graph: delayed gradients are in the module
        self.warned_autocast = False  # of a call under te.autocast, of a callable captured without it
        self.mode_mismatches = 0  # calls in another mode, train or eval, than the captured one


class Validity:
    """Whether a captured callable can still be called."""

    __slots__ = ("invalid", "on_reset", "was_reset")

    def __init__(self) -> None:
        self.invalid: str | None = None  # the reason, if it cannot be called any more
        self.was_reset = False  # its graphs were dropped
        self.on_reset: Callable[[], object] | None = None
