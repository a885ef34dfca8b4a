"""Captures a set of callables in the order of a schedule, after their warm-up.

- If a capture fails, modules, random states and memory are as before.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpu_offload.layer import offloads_started
from transformer_engine.pytorch.distributed.peer import channels_noted
from transformer_engine.pytorch.graph.backend.cpu import CpuGraphs
from transformer_engine.pytorch.graph.backend.cuda import CudaGraphs
from transformer_engine.pytorch.graph.backend.interface import Graph, HostSync
from transformer_engine.pytorch.graph.capture import order
from transformer_engine.pytorch.graph.capture.builder import GraphedBuilder
from transformer_engine.pytorch.graph.capture.checks import buffers_unchanged, record_guards_once
from transformer_engine.pytorch.graph.capture.inputs import static_inputs
from transformer_engine.pytorch.graph.capture.microbatches import Microbatches
from transformer_engine.pytorch.graph.capture.module_call import ModuleCall, eager_function
from transformer_engine.pytorch.graph.capture.order import Step
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.state_guard import StateGuard
from transformer_engine.pytorch.graph.capture.static_callable import CallModes, StaticCallable
from transformer_engine.pytorch.graph.capture.version_bumps import record_mutations
from transformer_engine.pytorch.graph.capture.warmup import warm_up
from transformer_engine.pytorch.graph.describe import OP, callable_name, short_repr
from transformer_engine.pytorch.graph.memory.buffers import BufferPool
from transformer_engine.pytorch.graph.memory.in_flight import in_flight_of
from transformer_engine.pytorch.graph.memory.replay_order import ReplayOrder
from transformer_engine.pytorch.graph.observers import captured, pass_begins
from transformer_engine.pytorch.graph.replay.graphed import Graphed
from transformer_engine.pytorch.graph.replay.scales import Scales
from transformer_engine.pytorch.saved.marks import mark_not_offload

# Captured callables whose static inputs no other capture may use. reset() clears these inputs.
_live: "weakref.WeakSet[Graphed]" = weakref.WeakSet()
_live_lock = threading.Lock()  # several threads may capture


def captures_of(params: Iterable[torch.Tensor]) -> list[str]:
    """Labels of the callables whose graphs use one of these parameters, at the address that it has now."""
    wanted = {id(p) for p in params}
    with _live_lock:
        records = [graphed.record for graphed in _live]
    found = set()
    for record in records:
        of_module = [] if record.module is None else record.module.parameters()
        if record.validity.invalid is None and any(id(p) in wanted for p in (*record.parameters, *of_module)):
            found.add(record.label)
    return sorted(found)


class Capture:
    """One call of make_graphed_callables: a builder for each sample, and the memory that their graphs share."""

    def __init__(self, plan: CapturePlan, generators: Sequence[torch.Generator]) -> None:
        self.plan = plan
        if plan.device.type == "cuda":
            self.backend = CudaGraphs(plan.device, plan.pool, generators)
        else:
            self.backend = CpuGraphs()
        self.buffers = BufferPool()  # for incoming gradients
        self.in_flight, self.order = in_flight_of(plan.pool), ReplayOrder(self.backend)
        self.builders: list[GraphedBuilder] = []  # one for each sample
        self.latest_backward: GraphedBuilder | None = None
        self.complete: list[GraphedBuilder] = []  # whose backward was captured after the latest forward

    def run(self) -> list[Graphed]:
        plan = self.plan
        with _live_lock:
            others = list(_live)
        inputs = static_inputs(plan, [t for graphed in others for t in graphed.record.forward_graph.inputs])
        modes = CallModes(plan.device.type)
        for i in range(plan.schedule.samples):
            module = plan.module_of(i)
            eager = plan.modules[module]
            func = StaticCallable(
                eager_function(eager), eager, plan.signatures[i], inputs[i], modes, plan.quantizations[module]
            )
            func.retain_graph = plan.retain_graph
            self.builders.append(GraphedBuilder(f"graphed {callable_name(eager, module)}", func, eager_function(eager)))
        mark_not_offload(*(t for own in inputs for t in own))  # static: offloading them would free no memory
        guard = StateGuard(plan.modules, [t for own in inputs for t in own])
        self.microbatches = Microbatches(plan, [builder.func for builder in self.builders], guard)
        before = offloads_started()
        try:
            with self.backend.session(), guard, _C.FreshAccumulators(self._leaves()):
                warm_up(self.microbatches, self.backend)
                self.backend.prepare(warmed=plan.warmup_iterations > 0)
                pass_begins()
                for step in plan.schedule.steps:
                    getattr(self, f"_capture_{step.kind}")(step)
                    self._record_position(step)
                self.builders[plan.schedule.steps[0].sample].freed_results += self._free_results()
                for builder in self.builders:
                    if builder.func.retain_graph and not plan.reuse_buffers:  # used until the last capture
                        self._end_lifetime(builder)
                captured(self.order)
                offloads, order = offloads_started() != before, None if self.order.tied is None else self.order
                graphed = [b.build(plan, self.backend, self.in_flight, order, offloads=offloads) for b in self.builders]
        except BaseException:
            for builder in self.builders:
                builder.drop()
                builder.func.drop_tensors()
            self.buffers = BufferPool()
            raise
        finally:
            pass_begins()  # the captures were a step, also where they failed
        with _live_lock:
            _live.update(graphed)
        return graphed

    def _leaves(self) -> list[torch.Tensor]:
        """Parameters. Their AccumulateGrad nodes may belong to another stream if a result from there is alive, or if a
        framework keeps the nodes for hooks."""
        return list({id(p): p for m in self.plan.torch_modules() for p in m.parameters()}.values())

    # ---- one method for each kind of step ----

    def _capture(
        self, step: Step, func: Callable[[], list], *, private_pool: bool = False
    ) -> tuple[Graph, list[torch.Tensor | None], frozenset]:
        try:
            with channels_noted(self.builders[step.sample].peer_channels):
                return self.backend.capture(func, private_pool=private_pool)
        except HostSync as error:
            raise RuntimeError(
                f"{OP}: the {step.kind} of {self.plan.name(step)} cannot be captured: {error}, but a graph runs "
                "without the host. Compute it on the device, or do not capture this part."
            ) from error

    def _capture_forward(self, step: Step) -> None:
        builder, microbatches, name = self.builders[step.sample], self.microbatches, self.plan.name(step)
        func, module = builder.func, self.plan.modules[step.module]
        builder.freed_results = self._free_results()
        microbatches.run_hooks(step, "forward_pre_hooks")
        first = func not in microbatches.ran
        if isinstance(func.function, ModuleCall):
            func.function.freeze()
        with (
            microbatches.values_restored(step),
            buffers_unchanged(name, module),
            record_mutations(module, builder.mutated),
        ):
            try:
                forward = record_guards_once(func) if first else func.forward
                builder.forward_graph, builder.outputs, builder.forward_events = self._capture(step, forward)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise RuntimeError(
                    f"{OP}: {name} uses torch.func, whose saved tensors cannot be observed; argument "
                    "'num_warmup_iters' is 0, wanted at least 1 for it."
                ) from error
        if not builder.outputs:
            raise ValueError(
                f"{OP}: the result of {name} has no tensor (got {short_repr(func.result_leaves)}), wanted at least "
                "one, since a replay computes only tensors; return the computed tensors."
            )
        microbatches.check_forward(step)
        microbatches.run_hooks(step, "forward_hooks")
        func.static_outputs_with_grad = [t for t, required in zip(builder.outputs, func.differentiable) if required]
        quantization = func.quantization
        builder.scales = Scales(builder.label, func.parts, quantization.used_scales, quantization.group)

    def _capture_backward(self, step: Step) -> None:
        builder, microbatches = self.builders[step.sample], self.microbatches
        func = builder.func
        if not func.has_backward():
            return
        func.grad_outputs = [self.buffers.acquire_dense(t) for t in func.static_outputs_with_grad]
        for t in func.grad_outputs:
            t.fill_(1)
        grad_outputs = iter(func.grad_outputs)
        builder.grad_outputs = [next(grad_outputs) if required else None for required in func.differentiable]
        microbatches.run_hooks(step, "backward_pre_hooks")
        with record_mutations(self.plan.modules[step.module], builder.mutated_backward):
            builder.backward_graph, grads, builder.backward_events = self._capture(step, func.backward)
        microbatches.run_hooks(step, "backward_hooks")
        microbatches.check_all_used(step, grads)
        count = len(func.inputs_requiring_grad)
        builder.grad_inputs, builder.grad_parameters = grads[:count], grads[count:]
        if step.module not in self.plan.schedule.scheduled_wgrad:
            builder.kept_alive = list(func.pending)
        previous, self.latest_backward = self.latest_backward, builder
        # A gradient in the memory of an incoming one is copied: that buffer may belong to the next microbatch.
        if previous is not None and not previous.grads_share_memory():
            previous.next_backward = self.in_flight.captured
        self.complete.append(builder)
        if self.plan.reuse_buffers:
            self._free_memory(builder, step, previous)

    def _capture_wgrad(self, step: Step) -> None:
        builder, plan = self.builders[step.sample], self.plan
        func = builder.func
        if not func.pending:
            return
        # Without an entry in the order it may run at any time: no other graph may use its memory, or what it reads.
        private_pool = step.module not in plan.schedule.scheduled_wgrad
        builder.wgrad_graph, grads, _ = self._capture(step, func.wgrad, private_pool=private_pool)
        pairs = [(p, g) for p, g in zip(func.parameters, grads) if g is not None]
        pairs = [(p, g) for p, g in pairs if id(p) not in func.accumulated_by_wgrad]
        if plan.reuse_buffers:
            pairs = [
                (p, g if plan.keeps_static_grad(p) else self.backend.release([g], private_pool=private_pool)[0])
                for p, g in pairs
            ]
        builder.wgrads = pairs
        builder.delayed_modules = list(func.delayed_modules)
        if plan.reuse_buffers and plan.last_use(step):
            for t in func.grad_outputs:
                self.buffers.release(t)

    def _record_position(self, step: Step) -> None:
        """Stores the position of a captured step. A step without an entry in the order may be replayed at any time."""
        builder = self.builders[step.sample]
        position, self.in_flight.captured = self.in_flight.captured, self.in_flight.captured + 1
        if step.kind != order.WGRAD or step.module in self.plan.schedule.scheduled_wgrad:
            setattr(builder, f"{step.kind}_position", position)
        if step.kind == order.WGRAD:
            builder.wgrad_captured_at = position
        if step.kind == order.BACKWARD:
            builder.end_position = position
        if step.kind == order.FORWARD:
            builder.forward_turn = self.order.add(f"the forward of {builder.label}")
        elif step.kind == order.BACKWARD and builder.backward_graph is not None:
            builder.backward_turn = self.order.add(f"the backward of {builder.label}")

    # ---- release of memory that is not read any more ----

    def _free_memory(self, builder: GraphedBuilder, step: Step, previous: GraphedBuilder | None) -> None:
        """Releases the memory that is not read after a replay of this backward: the gradients of inputs that the
        previous backward returned, and the gradients of parameters that are returned as copies."""
        release, func = self.backend.release, builder.func
        if previous is not None:
            previous.grad_inputs = release(previous.grad_inputs)
        builder.grad_parameters = [
            grad if id(p) in func.accumulated_by_backward or self.plan.keeps_static_grad(p) else release([grad])[0]
            for p, grad in zip(func.parameters, builder.grad_parameters)
        ]
        if self.plan.last_use(step):
            for t in func.grad_outputs:
                self.buffers.release(t)

    def _free_results(self) -> list[torch.Tensor]:
        """Releases the results of complete microbatches: no backward reads them any more, but a caller may read them
        until the next forward. The backwards in between release more memory than these results need."""
        found = []
        for builder in self.complete if self.plan.reuse_buffers else ():
            builder.outputs = self.backend.release(builder.outputs)
            builder.func.static_outputs_with_grad = []
            found += builder.outputs
            if builder.func.retain_graph:  # its inputs are released at the same time
                self._end_lifetime(builder)
        self.complete = []
        return found

    def _end_lifetime(self, builder: GraphedBuilder) -> None:
        """The memory that its backward reads is released here; the position is unique to this microbatch."""
        builder.end_position, self.in_flight.captured = self.in_flight.captured, self.in_flight.captured + 1
