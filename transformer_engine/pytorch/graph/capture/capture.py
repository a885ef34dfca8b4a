"""Captures of a set of callables in the order of a schedule, behind their warm-up. Either all of it succeeds, or none
of it stays: modules, random states and memory are as before."""

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import pass_ended
from transformer_engine.pytorch.cpu_offload.leaving import layers_that_left
from transformer_engine.pytorch.distributed.peer import channels_noted
from transformer_engine.pytorch.graph.backend.cpu import CpuGraphs
from transformer_engine.pytorch.graph.backend.cuda import CudaGraphs
from transformer_engine.pytorch.graph.backend.interface import Graph, HostSync
from transformer_engine.pytorch.graph.capture import order
from transformer_engine.pytorch.graph.capture.checks import buffers_stay, noted_once
from transformer_engine.pytorch.graph.capture.draft import Draft
from transformer_engine.pytorch.graph.capture.inputs import static_inputs
from transformer_engine.pytorch.graph.capture.order import Step
from transformer_engine.pytorch.graph.capture.own_call import OwnCall, function_of
from transformer_engine.pytorch.graph.capture.passes import Passes
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.untouched import Untouched
from transformer_engine.pytorch.graph.capture.warmup import warm_up
from transformer_engine.pytorch.graph.capture.work import Ambient, Work
from transformer_engine.pytorch.graph.capture.writes import writes_noted
from transformer_engine.pytorch.graph.describe import OP, name_of, shown
from transformer_engine.pytorch.graph.memory.buffers import Buffers
from transformer_engine.pytorch.graph.memory.flight import flight_of
from transformer_engine.pytorch.graph.replay.replay import Graphed
from transformer_engine.pytorch.graph.replay.scales import Scales
from transformer_engine.pytorch.saved.marks import mark_not_offload

# Whose static inputs nobody else may have; reset() empties them.
_live: "weakref.WeakSet[Graphed]" = weakref.WeakSet()
_lived = threading.Lock()  # around it: other threads capture too


class Capture:
    def __init__(self, plan: CapturePlan, generators: Sequence[torch.Generator]) -> None:
        self.plan = plan
        if plan.device.type == "cuda":
            self.backend = CudaGraphs(plan.device, plan.pool, generators)
        else:
            self.backend = CpuGraphs()
        self.buffers = Buffers()  # of gradients that come in
        self.flight = flight_of(plan.pool)
        self.drafts: list[Draft] = []  # of each sample
        self.latest_backward: Draft | None = None
        self.over: list[Draft] = []  # whose backward was captured, and no forward behind it

    def run(self) -> list[Graphed]:
        plan = self.plan
        with _lived:
            others = list(_live)
        inputs = static_inputs(plan, [t for graphed in others for t in graphed.forward_graph.inputs])
        ambient = Ambient(plan.device.type)
        for i in range(plan.schedule.samples):
            module = plan.module_of(i)
            eager = plan.modules[module]
            work = Work(function_of(eager), eager, plan.signatures[i], inputs[i], ambient, plan.quantizations[module])
            work.retain = plan.retain
            self.drafts.append(Draft(f"graphed {name_of(eager, module)}", work, function_of(eager)))
        mark_not_offload(*(t for own in inputs for t in own))  # static: that they leave would give nothing back
        untouched = Untouched(plan.modules, [t for own in inputs for t in own])
        self.passes = Passes(plan, [draft.work for draft in self.drafts], untouched)
        before = layers_that_left()
        try:
            with self.backend.session(), untouched, _C.FreshAccumulators(self._leaves()):
                warm_up(self.passes, self.backend)
                self.backend.prepare(warmed=plan.warmup_iterations > 0)
                for step in plan.schedule.steps:
                    getattr(self, f"_capture_{step.kind}")(step)
                    self._place(step)
                self.drafts[plan.schedule.steps[0].sample].buried += self._bury_results()
                for draft in self.drafts:
                    if draft.work.retain and not plan.reuse:  # until all is captured
                        self._end_here(draft)
                offloads = layers_that_left() != before
                finished = [d.finished(plan, self.backend, self.flight, offloads=offloads) for d in self.drafts]
        except BaseException:
            for draft in self.drafts:
                draft.drop()
                draft.work.forget()
            self.buffers = Buffers()
            pass_ended()  # the one that failed: what has steps begins its next one, as behind a pass that did not
            raise
        with _lived:
            _live.update(finished)
        return finished

    def _leaves(self) -> list[torch.Tensor]:
        """Parameters, whose accumulators may be those of another stream: a result from there is alive, or a framework
        keeps them for their hooks."""
        return list({id(p): p for m in self.plan.torch_modules() for p in m.parameters()}.values())

    # ---- the kinds of steps ----

    def _capture(
        self, step: Step, work: Callable[[], list], *, apart: bool = False
    ) -> tuple[Graph, list[torch.Tensor | None], frozenset]:
        try:
            with channels_noted(self.drafts[step.sample].channels):
                return self.backend.capture(work, apart=apart)
        except HostSync as error:
            raise RuntimeError(
                f"{OP}: the {step.kind} of {self.plan.name(step)} cannot be captured: {error}, and a graph runs "
                "without the host. Compute it on the device, or leave this part outside of what is captured."
            ) from error

    def _capture_forward(self, step: Step) -> None:
        draft, passes, name = self.drafts[step.sample], self.passes, self.plan.name(step)
        work, module = draft.work, self.plan.modules[step.module]
        draft.buried = self._bury_results()
        passes.hooks(step, "forward_pre_hooks")
        first = work not in passes.ran
        if isinstance(work.function, OwnCall):
            work.function.freeze()
        with passes.values_kept(step), buffers_stay(name, module), writes_noted(module, draft.touched):
            try:
                forward = noted_once(work) if first else work.forward
                draft.forward_graph, draft.outputs, draft.forward_events = self._capture(step, forward)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise RuntimeError(
                    f"{OP}: {name} uses torch.func, which cannot be looked into; argument 'num_warmup_iters' is 0, "
                    "wanted at least 1 for it."
                ) from error
        if not draft.outputs:
            raise ValueError(
                f"{OP}: the result of {name} has no tensor (got {shown(work.result)}), wanted one at least: a replay "
                "would give nothing anew; return what it computes."
            )
        passes.check_forward(step)
        passes.hooks(step, "forward_hooks")
        work.static_live = [t for t, wants in zip(draft.outputs, work.differentiable) if wants]
        quantization = work.quantization
        draft.scales = Scales(draft.label, work.parts, quantization.noted, quantization.group)

    def _capture_backward(self, step: Step) -> None:
        draft, passes = self.drafts[step.sample], self.passes
        work = draft.work
        if not work.has_backward():
            return
        work.grad_outputs = [self.buffers.take_apart(t) for t in work.static_live]
        for t in work.grad_outputs:
            t.fill_(1)
        grad_outputs = iter(work.grad_outputs)
        draft.grad_outputs = [next(grad_outputs) if wants else None for wants in work.differentiable]
        passes.hooks(step, "backward_pre_hooks")
        with writes_noted(self.plan.modules[step.module], draft.touched_backward):
            draft.backward_graph, grads, draft.backward_events = self._capture(step, work.backward)
        passes.hooks(step, "backward_hooks")
        passes.check_used(step, grads)
        count = len(work.wanted)
        draft.grad_inputs, draft.grad_parameters = grads[:count], grads[count:]
        if step.module not in self.plan.schedule.scheduled_wgrad:
            draft.held = list(work.pending)
        before, self.latest_backward = self.latest_backward, draft
        # A gradient in the memory of one that came in is handed on as a copy: the next pass may have that one's buffer.
        if before is not None and not before.meets_its_own():
            before.next_backward = self.flight.captured
        self.over.append(draft)
        if self.plan.reuse:
            self._bury(draft, step, before)

    def _capture_wgrad(self, step: Step) -> None:
        draft, plan = self.drafts[step.sample], self.plan
        work = draft.work
        if not work.pending:
            return
        # Without an entry in the order it may run at any time: neither may its memory be somebody's, nor what it reads.
        apart = step.module not in plan.schedule.scheduled_wgrad
        draft.wgrad_graph, grads, _ = self._capture(step, work.wgrad, apart=apart)
        pairs = [(p, g) for p, g in zip(work.parameters, grads) if g is not None]
        pairs = [(p, g) for p, g in pairs if id(p) not in work.accumulated_later]
        if plan.reuse:
            pairs = [(p, g if plan.stays(p) else self.backend.release([g], apart=apart)[0]) for p, g in pairs]
        draft.wgrads = pairs
        draft.delaying = list(work.delaying)
        if plan.reuse and plan.last_use(step):
            for t in work.grad_outputs:
                self.buffers.give(t)

    def _place(self, step: Step) -> None:
        """Notes when a step was captured. One without an entry in the order may be replayed at any time."""
        draft = self.drafts[step.sample]
        position, self.flight.captured = self.flight.captured, self.flight.captured + 1
        if step.kind != order.WGRAD or step.module in self.plan.schedule.scheduled_wgrad:
            setattr(draft, f"{step.kind}_position", position)
        if step.kind == order.WGRAD:
            draft.wgrad_captured = position
        if step.kind == order.BACKWARD:
            draft.end_position = position

    # ---- memory that nobody reads any more ----

    def _bury(self, draft: Draft, step: Step, before: Draft | None) -> None:
        """Gives the memory back that nobody reads once this backward has been replayed: the gradients of the inputs
        that the backward before this one handed on. Parameters' gradients go where copies of them are handed out."""
        release, work = self.backend.release, draft.work
        if before is not None:
            before.grad_inputs = release(before.grad_inputs)
        draft.grad_parameters = [
            grad if id(p) in work.accumulated or self.plan.stays(p) else release([grad])[0]
            for p, grad in zip(work.parameters, draft.grad_parameters)
        ]
        if self.plan.last_use(step):
            for t in work.grad_outputs:
                self.buffers.give(t)

    def _bury_results(self) -> list[torch.Tensor]:
        """Those of passes that are over: whatever was made of them is through with its own backward, but a caller may
        look at them until the next call. They take no memory from the backward passes in between, each of which frees
        what its pass saved."""
        found = []
        for draft in self.over if self.plan.reuse else ():
            draft.outputs = self.backend.release(draft.outputs)
            draft.work.static_live = []
            found += draft.outputs
            if draft.work.retain:  # its inputs go with them, no sooner
                self._end_here(draft)
        self.over = []
        return found

    def _end_here(self, draft: Draft) -> None:
        """What its backward reads is kept until now; the position is its own."""
        draft.end_position, self.flight.captured = self.flight.captured, self.flight.captured + 1
