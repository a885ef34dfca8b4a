"""The record that a capture makes of one callable and microbatch; Graphed and its parts read it at each call."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch.graph.backend.interface import Backend, Graph
from transformer_engine.pytorch.graph.memory.aliased_grads import AliasedGrads
from transformer_engine.pytorch.graph.memory.buffers import copy_into_static
from transformer_engine.pytorch.graph.memory.in_flight import CapturedMicrobatch, InFlight
from transformer_engine.pytorch.graph.memory.replay_order import ReplayOrder
from transformer_engine.pytorch.graph.observers import WeightWait
from transformer_engine.pytorch.graph.recorded.captured import (
    BackwardGraph,
    CallState,
    ForwardGraph,
    Validity,
    WeightGradGraph,
)
from transformer_engine.pytorch.graph.recorded.quantization import WeightFlag
from transformer_engine.pytorch.graph.replay.scales import Scales
from transformer_engine.pytorch.graph.replay.signature import Signature
from transformer_engine.pytorch.quantization.recipes.products import Plan


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CaptureRecord:
    label: str
    signature: Signature
    backend: Backend
    eager: Callable
    module: torch.nn.Module | None
    training: bool | None
    forward_graph: ForwardGraph
    backward_graph: BackwardGraph | None
    wgrad_graph: WeightGradGraph | None
    inputs_requiring_grad: list[int]
    parameters: list[torch.nn.Parameter]  # that get a gradient
    frozen: list[torch.nn.Parameter]  # that did not require one at the capture
    weight_waits: tuple[WeightWait, ...]  # to call before a replay, which reads parameters
    captured_no_grad: bool  # captured under torch.no_grad()
    offloads: bool  # graphs of its capture copy saved tensors to the host and back
    peer_channels: list[_C.PeerChannel]  # over which its graphs communicate
    recipe_plan: Plan | None  # of the recipe of the capture
    scales: Scales
    weight_flag: WeightFlag | None  # if each call decides whether weights are quantized again
    cached_weights: list[torch.nn.Parameter]  # whose quantized copies all calls of the module share
    in_flight: InFlight | None  # if other graphs use the same pool
    aliased_grads: AliasedGrads
    microbatch: CapturedMicrobatch
    order: ReplayOrder | None  # if copies tie its graphs to others
    forward_turn: int  # their positions in the order
    backward_turn: int
    calls: CallState
    validity: Validity

    def launch(self, graph: Graph, to_copy: tuple, stream, event, first_microbatch: bool | None = None) -> None:
        """Copies into static tensors (to_copy: the arguments of copy_into_static), then replays the graph. If `stream`
        is another one, the current stream waits for it or for `event`. first_microbatch: of a forward, sets the weight
        flag."""
        current = self.backend.current_stream()
        other_stream = stream is not None and stream != current
        if other_stream:
            stream.wait_stream(current)
        if self.order is not None:
            self.order.wait(stream if other_stream else current)
        # The copies run there too: the end of the previous replay may still read what they write.
        with self.backend.on(stream) if other_stream else nullcontext():
            copy_into_static(*to_copy)
            if self.weight_flag is not None and first_microbatch is not None:
                self.weight_flag.set(first_microbatch and not recompute_phase().recomputing, self.cached_weights)
            graph.replay()
        if not other_stream:
            return
        if event is None:
            current.wait_stream(stream)
            return
        current.wait_event(event)
        if self.order is not None:
            self.order.unfinished = stream
