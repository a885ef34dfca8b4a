"""Collects the graphs of a microbatch while it is captured, and builds the captured callable (Graphed) from them.

- Nothing is captured here.
- The callable is frozen once it is built.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.graph.backend.interface import Backend, Graph
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.static_callable import StaticCallable
from transformer_engine.pytorch.graph.capture.version_bumps import new_outputs
from transformer_engine.pytorch.graph.memory.buffers import overlap_range_of, spans_overlap
from transformer_engine.pytorch.graph.memory.in_flight import CapturedMicrobatch, InFlight
from transformer_engine.pytorch.graph.memory.replay_order import ReplayOrder
from transformer_engine.pytorch.graph.observers import weight_waits
from transformer_engine.pytorch.graph.recorded.captured import (
    BackwardGraph,
    CallState,
    ForwardGraph,
    Validity,
    WeightGradGraph,
)
from transformer_engine.pytorch.graph.recorded.main_grads import FusedWeight
from transformer_engine.pytorch.graph.replay.graphed import Graphed
from transformer_engine.pytorch.graph.replay.scales import Scales


def any_overlap(some: Iterable[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """Whether the memory of one of these overlaps that of one of the others."""
    return any(spans_overlap(a, b) for a in some if a is not None for b in others if b is not None)


class GraphedBuilder:
    """The graphs, static tensors and positions of one microbatch."""

    def __init__(self, label: str, func: StaticCallable, eager: Callable) -> None:
        self.label, self.func, self.eager = label, func, eager
        self.forward_graph: Graph | None = None
        self.backward_graph: Graph | None = None
        self.wgrad_graph: Graph | None = None
        self.forward_events = self.backward_events = frozenset()
        self.scales: Scales | None = None
        self.peer_channels: set[_C.PeerChannel] = set()  # over which its graphs communicate
        self.forward_position = self.backward_position = self.end_position = 0
        self.forward_turn = self.backward_turn = 0
        self.next_backward = -1
        self.wgrad_position: int | None = None
        self.wgrad_captured_at = 0
        self._drop_tensors()

    def _drop_tensors(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.grad_outputs: list[torch.Tensor | None] = []
        self.grad_inputs: list[torch.Tensor | None] = []
        self.grad_parameters: list[torch.Tensor | None] = []
        self.wgrads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.mutated: list[torch.Tensor] = []  # parameters and buffers that the forward writes to
        self.mutated_backward: list[torch.Tensor] = []
        # Results of earlier microbatches, whose memory the forward may overwrite.
        self.freed_results: list[torch.Tensor] = []
        self.kept_alive: list[object] = []
        self.delayed_modules: list = []

    def drop(self) -> None:
        """After an exception: resets the graphs and releases their memory."""
        for graph in (self.forward_graph, self.backward_graph, self.wgrad_graph):
            if graph is not None:
                graph.reset()
        self._drop_tensors()

    def grads_share_memory(self) -> bool:
        """Whether a gradient of an input shares memory with an incoming gradient."""
        return any_overlap(self.grad_inputs, self.grad_outputs)

    def build(
        self, plan: CapturePlan, backend: Backend, in_flight: InFlight, order: ReplayOrder | None, *, offloads: bool
    ) -> Graphed:
        func, weight_flag = self.func, self.func.quantization.weight_flag
        params = self._params_with_grads()
        own = [p for part in func.parts for p in part.parameters(recurse=False)]
        module = func.module if isinstance(func.module, torch.nn.Module) else None
        graphed = Graphed(
            label=self.label,
            signature=func.signature,
            backend=backend,
            eager=self.eager,
            module=module,
            training=None if module is None else module.training,
            forward_graph=self._forward(backend),
            backward_graph=self._backward(plan, backend, params),
            wgrad_graph=self._weight_grads(plan),
            inputs_requiring_grad=func.inputs_requiring_grad,
            parameters=[p for p, _ in params],
            frozen=func.frozen,
            weight_waits=() if module is None else weight_waits(list(module.parameters())),
            captured_no_grad=not func.modes.grad,
            offloads=offloads,
            peer_channels=list(self.peer_channels),
            recipe_plan=func.quantization.plan,
            scales=self.scales,
            weight_flag=plan.weight_flag,
            cached_weights=[] if weight_flag is None else [p for p in own if p.dim() >= 2],
            in_flight=in_flight if plan.schedule.samples > 1 or plan.pool is not None else None,
            aliased_grads=in_flight.aliased_grads,
            microbatch=self._microbatch(),
            order=order,
            forward_turn=self.forward_turn,
            backward_turn=self.backward_turn,
            calls=CallState(),
            validity=Validity(),
        )
        func.signature.forget_tensors()
        func.outputs_with_grad = []
        return graphed

    def _microbatch(self) -> CapturedMicrobatch:
        return CapturedMicrobatch(
            label=self.label,
            outputs=new_outputs(self.outputs, self.func),
            forward_position=self.forward_position,
            backward_position=self.backward_position,
            end_position=self.end_position,
            wgrad_position=self.wgrad_position,
            delays_wgrad=self.wgrad_graph is not None,
            retain_graph=self.func.retain_graph,
        )

    def _params_with_grads(self) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
        """Parameters with their gradients from the backward, without parameters that get none: those must not be
        inputs of the autograd node."""
        func = self.func
        if self.backward_graph is None:
            return [(p, None) for p in func.parameters]
        later = func.accumulated_by_backward | func.accumulated_by_wgrad | {id(p) for p, _ in self.wgrads}
        pairs = zip(func.parameters, self.grad_parameters, strict=True)
        return [(p, grad) for p, grad in pairs if grad is not None or id(p) in later]

    def _forward(self, backend: Backend) -> ForwardGraph:
        func = self.func
        mutated_inputs = [func.inputs[i] for i in func.mutated_inputs]
        outputs = new_outputs(self.outputs, func)
        return ForwardGraph(
            graph=self.forward_graph,
            replay=backend.replay_of(self.forward_graph),
            events=self.forward_events,
            inputs=list(func.inputs),
            input_addresses=[t.data_ptr() for t in func.inputs],
            overlap_range=overlap_range_of(func.inputs),
            mutated_inputs=func.mutated_inputs,
            outputs=self.outputs,
            non_differentiable_outputs=[i for i, required in enumerate(func.differentiable) if not required],
            version_bumps=outputs + mutated_inputs + self.mutated + self.freed_results,
            guarded_inputs=func.guarded_inputs,
            guarded_results=func.guarded_results,
            result_spec=func.result_spec,
            returns_one_tensor=func.result_spec.is_leaf(),
            result_leaves=func.result_leaves,
            is_tensor=func.is_tensor,
        )

    def _shares_memory(self, grad: torch.Tensor | None) -> bool:
        """Whether another gradient shares memory with that of a parameter: accumulation would change both."""
        others = [*self.grad_parameters, *self.grad_inputs, *self.grad_outputs]
        return any_overlap([grad], [other for other in others if other is not grad])

    def _backward(
        self, plan: CapturePlan, backend: Backend, params: list[tuple[torch.nn.Parameter, torch.Tensor | None]]
    ) -> BackwardGraph | None:
        func = self.func
        if self.backward_graph is None:
            return None
        fused = func.accumulated_by_backward | func.accumulated_by_wgrad
        copied = [
            id(p) not in fused and (not plan.keeps_static_grad(p) or self._shares_memory(grad)) for p, grad in params
        ]
        pairs = list(zip(params, copied))
        static = [(p, grad) for (p, grad), copy in pairs if not copy and grad is not None and id(p) not in fused]
        handed_out = [*self.grad_inputs, *(grad for (_, grad), copy in pairs if not copy)]
        return BackwardGraph(
            graph=self.backward_graph,
            replay=backend.replay_of(self.backward_graph),
            events=self.backward_events,
            grad_outputs=self.grad_outputs,
            grad_addresses=[0 if t is None else t.data_ptr() for t in self.grad_outputs],
            overlap_range=overlap_range_of(self.grad_outputs),
            grad_inputs=self.grad_inputs,
            grad_parameters=[grad for _, grad in params],
            copied=copied,
            copied_grads=[grad for (_, grad), copy in pairs if copy and grad is not None],
            static_grads=static,
            version_bumps=[grad for grad in handed_out if grad is not None] + self.mutated_backward,
            guarded_module_tensors=func.guarded_module_tensors,
            fused=[FusedWeight.of(p) for p in func.parameters if id(p) in func.accumulated_by_backward],
            retain_graph=func.retain_graph,
            next_backward_position=self.next_backward,
        )

    def _weight_grads(self, plan: CapturePlan) -> WeightGradGraph | None:
        if self.wgrad_graph is None:
            return None
        fused = [FusedWeight.of(p) for p in self.func.parameters if id(p) in self.func.accumulated_by_wgrad]
        later = [p for p, _ in self.wgrads] + [weight for weight, _ in fused]
        return WeightGradGraph(
            graph=self.wgrad_graph,
            position=self.wgrad_captured_at,
            grads=self.wgrads,
            static_grads=[(p, grad) for p, grad in self.wgrads if plan.keeps_static_grad(p)],
            fused=fused,
            modules=self.delayed_modules,
            parameters=frozenset(map(id, later)),
            kept_alive=self.kept_alive,
        )
