"""A pass while it is captured: its draft grows graph by graph, and ends as a captured callable (replay.Graphed), which
is frozen. Captures nothing itself."""

from collections.abc import Callable, Iterable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.graph.backend.interface import Backend, Graph
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.work import Work
from transformer_engine.pytorch.graph.capture.writes import own_results
from transformer_engine.pytorch.graph.memory.buffers import neighbourhood, overlap
from transformer_engine.pytorch.graph.memory.flight import Flight, Pass
from transformer_engine.pytorch.graph.recorded.calls import Calls, Fitness
from transformer_engine.pytorch.graph.recorded.captured import BackwardGraph, ForwardGraph, WeightGradGraph
from transformer_engine.pytorch.graph.recorded.main_grads import Fused
from transformer_engine.pytorch.graph.replay.replay import Graphed
from transformer_engine.pytorch.graph.replay.scales import Scales


def meet(some: Iterable[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """Whether the memory of one of these and of one of those meets."""
    return any(overlap(a, b) for a in some if a is not None for b in others if b is not None)


class Draft:
    def __init__(self, label: str, work: Work, eager: Callable) -> None:
        self.label, self.work, self.eager = label, work, eager
        self.forward_graph: Graph | None = None
        self.backward_graph: Graph | None = None
        self.wgrad_graph: Graph | None = None
        self.forward_events = self.backward_events = frozenset()
        self.scales: Scales | None = None
        self.channels: set[_C.PeerChannel] = set()  # to peers, over which its graphs communicate
        self.forward_position = self.backward_position = self.end_position = 0
        self.next_backward = -1
        self.wgrad_position: int | None = None
        self.wgrad_captured = 0
        self._no_tensors()

    def _no_tensors(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.grad_outputs: list[torch.Tensor | None] = []
        self.grad_inputs: list[torch.Tensor | None] = []
        self.grad_parameters: list[torch.Tensor | None] = []
        self.wgrads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.touched: list[torch.Tensor] = []  # parameters and buffers that the forward writes to
        self.touched_backward: list[torch.Tensor] = []
        self.buried: list[torch.Tensor] = []  # results of earlier passes, whose memory the forward may have
        self.held: list[object] = []
        self.delaying: list = []

    def drop(self) -> None:
        """After an exception: the graphs and their memory."""
        for graph in (self.forward_graph, self.backward_graph, self.wgrad_graph):
            if graph is not None:
                graph.reset()
        self._no_tensors()

    def meets_its_own(self) -> bool:
        """Whether a gradient of an input lies in the memory of one that came in."""
        return meet(self.grad_inputs, self.grad_outputs)

    def finished(self, plan: CapturePlan, backend: Backend, flight: Flight, *, offloads: bool) -> Graphed:
        work, flag = self.work, self.work.quantization.flag
        reached = self._reached()
        graphs = self._forward(backend), self._backward(plan, backend, reached), self._weight_grads(plan)
        own = [p for part in work.parts for p in part.parameters(recurse=False)]
        module = work.module if isinstance(work.module, torch.nn.Module) else None
        graphed = Graphed(
            label=self.label,
            signature=work.signature,
            backend=backend,
            eager=self.eager,
            module=module,
            training=None if module is None else module.training,
            forward_graph=graphs[0],
            backward_graph=graphs[1],
            wgrad_graph=graphs[2],
            wanted=work.wanted,
            parameters=[p for p, _ in reached],
            frozen=work.frozen,
            without_grad=not work.ambient.grad,
            offloads=offloads,
            channels=list(self.channels),
            plan=work.quantization.plan,
            scales=self.scales,
            flag=plan.flag,
            kept_weights=[] if flag is None else [p for p in own if p.dim() == 2],
            flight=flight if plan.schedule.samples > 1 or plan.pool is not None else None,
            loans=flight.loans,
            place=self._place(),
            calls=Calls(),
            fitness=Fitness(),
        )
        work.signature.forget_tensors()
        work.live = []
        return graphed

    def _place(self) -> Pass:
        return Pass(
            label=self.label,
            made=own_results(self.outputs, self.work),
            forward_position=self.forward_position,
            backward_position=self.backward_position,
            end_position=self.end_position,
            wgrad_position=self.wgrad_position,
            delays=self.wgrad_graph is not None,
            keeps=self.work.retain,
        )

    def _reached(self) -> list[tuple[torch.nn.Parameter, torch.Tensor | None]]:
        """Parameters with their gradients from the backward: autograd is not to come by those that get nothing."""
        work = self.work
        if self.backward_graph is None:
            return [(p, None) for p in work.parameters]
        later = work.accumulated | work.accumulated_later | {id(p) for p, _ in self.wgrads}
        pairs = zip(work.parameters, self.grad_parameters, strict=True)
        return [(p, grad) for p, grad in pairs if grad is not None or id(p) in later]

    def _forward(self, backend: Backend) -> ForwardGraph:
        work = self.work
        written = [work.inputs[i] for i in work.written]
        return ForwardGraph(
            graph=self.forward_graph,
            replay=backend.replay_of(self.forward_graph),
            events=self.forward_events,
            inputs=list(work.inputs),
            addresses=[t.data_ptr() for t in work.inputs],
            near=neighbourhood(work.inputs),
            written=work.written,
            outputs=self.outputs,
            constant_outputs=[i for i, wants in enumerate(work.differentiable) if not wants],
            writes=own_results(self.outputs, work) + written + self.touched + self.buried,
            guarded_inputs=work.guarded_inputs,
            guarded_results=work.guarded_results,
            form=work.form,
            single=work.form.is_leaf(),
            result=work.result,
            is_tensor=work.is_tensor,
        )

    def _shared(self, grad: torch.Tensor | None) -> bool:
        """Whether something else lies in a parameter's gradient: what is added to it would be added to that too."""
        others = [*self.grad_parameters, *self.grad_inputs, *self.grad_outputs]
        return meet([grad], [other for other in others if other is not grad])

    def _backward(
        self, plan: CapturePlan, backend: Backend, reached: list[tuple[torch.nn.Parameter, torch.Tensor | None]]
    ) -> BackwardGraph | None:
        work = self.work
        if self.backward_graph is None:
            return None
        fused = work.accumulated | work.accumulated_later
        copied = [id(p) not in fused and (not plan.stays(p) or self._shared(grad)) for p, grad in reached]
        pairs = list(zip(reached, copied))
        static = [(p, grad) for (p, grad), copy in pairs if not copy and grad is not None and id(p) not in fused]
        handed_out = [*self.grad_inputs, *(grad for (_, grad), copy in pairs if not copy)]
        return BackwardGraph(
            graph=self.backward_graph,
            replay=backend.replay_of(self.backward_graph),
            events=self.backward_events,
            grad_outputs=self.grad_outputs,
            grad_addresses=[0 if t is None else t.data_ptr() for t in self.grad_outputs],
            near=neighbourhood(self.grad_outputs),
            grad_inputs=self.grad_inputs,
            grad_parameters=[grad for _, grad in reached],
            copied=copied,
            copied_grads=[grad for (_, grad), copy in pairs if copy and grad is not None],
            static_grads=static,
            writes=[grad for grad in handed_out if grad is not None] + self.touched_backward,
            guarded_held=work.guarded_held,
            fused=[Fused.of(p) for p in work.parameters if id(p) in work.accumulated],
            keeps=work.retain,
            next_position=self.next_backward,
        )

    def _weight_grads(self, plan: CapturePlan) -> WeightGradGraph | None:
        if self.wgrad_graph is None:
            return None
        fused = [Fused.of(p) for p in self.work.parameters if id(p) in self.work.accumulated_later]
        later = [p for p, _ in self.wgrads] + [weight for weight, _ in fused]
        return WeightGradGraph(
            graph=self.wgrad_graph,
            position=self.wgrad_captured,
            grads=self.wgrads,
            static_grads=[(p, grad) for p, grad in self.wgrads if plan.stays(p)],
            fused=fused,
            modules=self.delaying,
            parameters=frozenset(map(id, later)),
            held=self.held,
        )
