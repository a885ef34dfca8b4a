"""Warm-up and captures of a set of callables in the order of a schedule. Either all of it succeeds, or nothing of it
stays: modules, random states and memory are as before."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.capture_flag import layers_that_left
from transformer_engine.pytorch.graph import order
from transformer_engine.pytorch.graph.buffers import Buffers, neighbourhood, overlap
from transformer_engine.pytorch.graph.capture_checks import buffers_stay, check_leaves, check_result, noted_once
from transformer_engine.pytorch.graph.capture_quantization import Quantization
from transformer_engine.pytorch.graph.cpu import CpuGraphs, HostSync
from transformer_engine.pytorch.graph.cuda import CudaGraphs
from transformer_engine.pytorch.graph.describe import OP, PLAIN, shown
from transformer_engine.pytorch.graph.flight import flight_of
from transformer_engine.pytorch.graph.order import Schedule, Step
from transformer_engine.pytorch.graph.own_call import OwnCall, function_of
from transformer_engine.pytorch.graph.replay import Graphed
from transformer_engine.pytorch.graph.replay_arguments import Signature
from transformer_engine.pytorch.graph.replay_scales import Scales
from transformer_engine.pytorch.graph.untouched import Untouched, values_kept
from transformer_engine.pytorch.graph.weight_grads import Fused
from transformer_engine.pytorch.graph.work import Ambient, Work
from transformer_engine.pytorch.graph.writes import own_results, writes_noted
from transformer_engine.pytorch.saved.marks import mark_not_offload

# Whose static inputs nobody else may have; reset() empties them.
_live: "weakref.WeakSet[Graphed]" = weakref.WeakSet()

Hooks = Mapping[str, Mapping[object, Callable[[object], None]]]


@dataclass
class Plan:
    """What is to be captured, all of it checked."""

    modules: Sequence[object]
    signatures: Sequence[Signature]  # one for each sample
    schedule: Schedule
    device: torch.device
    warmup_iterations: int
    hooks: Sequence[Hooks]  # one for each module
    quantizations: Sequence[Quantization]  # one for each module
    allow_unused_input: bool = False
    retain: bool = False
    reuse: bool = False
    clone_parameter_grads: bool = True
    pool: object | None = None
    before_warmup: Callable[[], object] | None = None
    after_warmup: Callable[[], object] | None = None
    delays: Sequence[bool] = field(default_factory=tuple)  # of each module: whether backward_dw() has something to do

    def module_of(self, sample: int) -> int:
        return next(step.module for step in self.schedule.steps if step.sample == sample)


def _meet(some: Iterable[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    return any(overlap(a, b) for a in some if a is not None for b in others if b is not None)


def name_of(module: object, index: int) -> str:
    named = type(module) if isinstance(module, torch.nn.Module) else module
    return f"callable {index} ({getattr(named, '__name__', type(module).__name__)})"


class Capture:
    def __init__(self, plan: Plan, generators: Sequence[torch.Generator]) -> None:
        self.plan = plan
        if plan.device.type == "cuda":
            self.backend = CudaGraphs(plan.device, plan.pool, generators)
        else:
            self.backend = CpuGraphs()
        self.buffers = Buffers()  # of gradients that come in
        self.flight = flight_of(plan.pool)
        self.works: list[Work] = []
        self.ran: set[Work] = set()
        self.modules_ran: set[int] = set()
        self.graphed: list[Graphed] = []
        self.latest_backward: Graphed | None = None
        self.over: list[int] = []  # samples whose backward was captured, and no forward behind it

    def run(self) -> list[Graphed]:
        plan = self.plan
        inputs = self._static_inputs()
        ambient = Ambient(plan.device.type)
        owners = [plan.module_of(i) for i in range(plan.schedule.samples)]
        for i, module in enumerate(owners):
            eager = plan.modules[module]
            work = Work(function_of(eager), eager, plan.signatures[i], inputs[i], ambient, plan.quantizations[module])
            work.retain = plan.retain
            self.works.append(work)
            label, again = f"graphed {name_of(eager, module)}", function_of(eager)
            self.graphed.append(Graphed(label, plan.signatures[i], self.backend, eager=again, module=eager))
        mark_not_offload(*(t for own in inputs for t in own))  # static: that they leave would give nothing back
        self.untouched = Untouched(plan.modules, [t for own in inputs for t in own])
        before = layers_that_left()
        try:
            with self.backend.session(), self.untouched, _C.FreshAccumulators(self._leaves()):
                self._warm_up()
                self.backend.prepare(warmed=plan.warmup_iterations > 0)
                for step in plan.schedule.steps:
                    getattr(self, f"_capture_{step.kind}")(step)
                    self._place(step)
                self.graphed[plan.schedule.steps[0].sample].buried += self._bury_results()
                for graphed, work in zip(self.graphed, self.works):
                    self._finish(graphed, work)
                    graphed.offloads = layers_that_left() != before
        except BaseException:
            for graphed in self.graphed:
                graphed.reset()
            for work in self.works:
                work.forget()
            self.buffers = Buffers()
            raise
        _live.update(self.graphed)
        return self.graphed

    def _leaves(self) -> list[torch.Tensor]:
        """Parameters, whose accumulators may be those of another stream: a result from there is alive, or a framework
        keeps them for their hooks."""
        modules = [m for m in self.plan.modules if isinstance(m, torch.nn.Module)]
        return list({id(p): p for m in modules for p in m.parameters()}.values())

    # ---- static inputs ----

    def _static_inputs(self) -> list[list[torch.Tensor]]:
        """One list for each sample: its own tensors, or with `reuse` those of samples that are done by then. One in
        memory that another sample has, of this capture or of an earlier one, is copied: the second would overwrite what
        the first one's backward needs. So is one in the memory of a parameter or a buffer."""
        samples = [signature.tensors() for signature in self.plan.signatures]
        taken = self._memory_of_others()
        if not self.plan.reuse:
            return [[self._own(t, taken) for t in tensors] for tensors in samples]
        buffers, inputs = Buffers(), [[] for _ in samples]
        for step in self.plan.schedule.steps:
            if step.kind == order.FORWARD:
                for t in samples[step.sample]:
                    memory = buffers.take(t) if buffers.has(t) else self._own(t, taken)
                    inputs[step.sample].append(memory.detach().requires_grad_(t.requires_grad))
            elif self._last_use(step):
                for t in inputs[step.sample]:
                    buffers.give(t)
        return inputs

    def _memory_of_others(self) -> set[int]:
        """Where what a call must not write to begins: other static inputs, parameters and buffers."""
        modules = [m for m in self.plan.modules if isinstance(m, torch.nn.Module)]
        others = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        others += [t for graphed in _live for t in graphed.inputs]
        return {
            t.untyped_storage().data_ptr()
            for t in others
            if type(t) in PLAIN and t.layout is torch.strided and not t.is_nested and t.numel()
        }

    @staticmethod
    def _own(t: torch.Tensor, taken: set[int]) -> torch.Tensor:
        address = t.untyped_storage().data_ptr()
        own = t.detach()
        if t.numel() and address in taken:
            own = Buffers().take(t).copy_(own)
        taken.add(own.untyped_storage().data_ptr())
        return own.requires_grad_(t.requires_grad)

    def _last_use(self, step: Step) -> bool:
        """Whether a pass is over with this step. One whose weight gradients may be asked for at any time never is."""
        if not self.plan.delays[step.module]:
            return step.kind == order.BACKWARD
        return step.kind == order.WGRAD and step.module in self.plan.schedule.scheduled_wgrad

    # ---- warm-up ----

    def _warm_up(self) -> None:
        plan = self.plan
        with self.backend.warming():
            if plan.before_warmup is not None:
                plan.before_warmup()
            with self._ended_by(plan.after_warmup):
                for iteration in range(plan.warmup_iterations):
                    for step in plan.schedule.steps:
                        getattr(self, f"_warm_{step.kind}")(step, iteration)
                for work in self.works:
                    work.live = []

    @contextmanager
    def _ended_by(self, hook: Callable[[], object] | None) -> Iterator[None]:
        """Calls what undoes the hook before the warm-up, also where the warm-up raises: then that is what is raised."""
        try:
            yield
        except BaseException:
            try:
                if hook is not None:
                    hook()
            except Exception as error:
                warnings.warn(
                    f"{OP}: 'post_warmup_hook', called behind a warm-up that failed, raised {type(error).__name__} "
                    f"too: {error}",
                    stacklevel=2,
                )
            raise
        if hook is not None:
            hook()

    def _hooks(self, step: Step, when: str) -> None:
        for hook in self.plan.hooks[step.module].get(when, {}).values():
            answer = hook(self.plan.modules[step.module])
            if answer is not None:
                raise RuntimeError(
                    f"{OP}: a hook of 'capture_time_hooks' ({when} of {self._name(step)}) returned a "
                    f"{type(answer).__name__}, wanted None: it runs outside the graph and cannot replace anything."
                )

    def _name(self, step: Step) -> str:
        return name_of(self.plan.modules[step.module], step.module)

    def _warm_forward(self, step: Step, iteration: int) -> None:
        self._hooks(step, "forward_pre_hooks")
        work = self.works[step.sample]
        with self._values_kept(step):
            if iteration == 0:
                self._noted_forward(work)
            else:
                work.forward()
        self._check_forward(step)
        self._hooks(step, "forward_hooks")

    @staticmethod
    def _noted_forward(work: Work) -> None:
        try:
            noted_once(work)()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            work.forward()  # torch.func inside, which takes no hooks: nothing is known of what it saves

    @contextmanager
    def _values_kept(self, step: Step) -> Iterator[None]:
        """Around a pass's first forward: inputs that it writes to, and a module's first pass parameters, get their
        values back when all is captured."""
        work = self.works[step.sample]
        if work in self.ran:
            yield
            return
        tensors = list(work.inputs)
        if step.module not in self.modules_ran:
            tensors += [p for p in (*work.parameters, *work.frozen) if type(p) in PLAIN]
        self.ran.add(work)
        self.modules_ran.add(step.module)
        try:
            with values_kept(tensors, self.untouched.undo):
                yield
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise ValueError(
                    f"{OP}: the forward of {self._name(step)} writes in place to an argument, or a parameter, that "
                    "wants a gradient; let it write to a copy, or pass the argument with requires_grad=False."
                ) from error
            raise

    def _check_forward(self, step: Step) -> None:
        work, name = self.works[step.sample], self._name(step)
        check_result(name, work)
        check_leaves(name, work)

    def _warm_backward(self, step: Step, iteration: int) -> None:
        work = self.works[step.sample]
        if not work.has_backward():
            return
        work.grad_outputs = [torch.ones_like(t) for t in work.live]
        self._hooks(step, "backward_pre_hooks")
        grads = work.backward()
        self._hooks(step, "backward_hooks")
        work.grad_outputs, work.live = [], []
        self._check_used(step, grads)

    def _check_used(self, step: Step, grads: list[torch.Tensor | None]) -> None:
        """Once for each pass: every input and parameter that wants a gradient gets one, now or later. A __call__ of its
        class's own may leave parameters to what is not captured."""
        work, plan = self.works[step.sample], self.plan
        if plan.allow_unused_input:
            return
        later = work.accumulated | work.left_for_later()
        names = [work.signature.names[work.signature.slots[i]] for i in work.wanted]
        wanted = [work.inputs[i] for i in work.wanted]
        if not isinstance(work.function, OwnCall):
            names += [f"parameter of shape {list(p.shape)}" for p in work.parameters]
            wanted += work.parameters
        for name, tensor, grad in zip(names, wanted, grads):
            if grad is None and id(tensor) not in later:
                raise RuntimeError(
                    f"{OP}: {name} of {self._name(step)} wants a gradient, but the outputs do not depend on it; pass "
                    "allow_unused_input=True, or requires_grad=False for it."
                )

    def _warm_wgrad(self, step: Step, iteration: int) -> None:
        if self.works[step.sample].pending:
            self.works[step.sample].wgrad()

    # ---- captures ----

    def _capture(
        self, step: Step, work: Callable[[], list], *, apart: bool = False
    ) -> tuple[object, list[torch.Tensor | None], frozenset]:
        try:
            return self.backend.capture(work, apart=apart)
        except HostSync as error:
            raise RuntimeError(
                f"{OP}: the {step.kind} of {self._name(step)} cannot be captured: {error}, and a graph runs without "
                "the host. Compute it on the device, or leave this part outside of what is captured."
            ) from error

    def _capture_forward(self, step: Step) -> None:
        work, graphed = self.works[step.sample], self.graphed[step.sample]
        graphed.buried = self._bury_results()
        self._hooks(step, "forward_pre_hooks")
        first = work not in self.ran
        if isinstance(work.function, OwnCall):
            work.function.freeze()
        module = self.plan.modules[step.module]
        with self._values_kept(step), buffers_stay(self._name(step), module), writes_noted(module, graphed.touched):
            try:
                forward = noted_once(work) if first else work.forward
                graphed.forward_graph, graphed.outputs, graphed.forward_events = self._capture(step, forward)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise RuntimeError(
                    f"{OP}: {self._name(step)} uses torch.func, which cannot be looked into; argument "
                    "'num_warmup_iters' is 0, wanted at least 1 for it."
                ) from error
        if not graphed.outputs:
            raise ValueError(
                f"{OP}: the result of {self._name(step)} has no tensor (got {shown(work.result)}), wanted one at "
                "least: a replay would give nothing anew; return what it computes."
            )
        self._check_forward(step)
        self._hooks(step, "forward_hooks")
        work.static_live = [t for t, wants in zip(graphed.outputs, work.differentiable) if wants]
        quantization = work.quantization
        graphed.scales = Scales(graphed.label, work.parts, quantization.noted, quantization.group)

    def _capture_backward(self, step: Step) -> None:
        work, graphed = self.works[step.sample], self.graphed[step.sample]
        if not work.has_backward():
            return
        work.grad_outputs = [self.buffers.take_apart(t) for t in work.static_live]
        for t in work.grad_outputs:
            t.fill_(1)
        grad_outputs = iter(work.grad_outputs)
        graphed.grad_outputs = [next(grad_outputs) if wants else None for wants in work.differentiable]
        self._hooks(step, "backward_pre_hooks")
        with writes_noted(self.plan.modules[step.module], graphed.touched_backward):
            graphed.backward_graph, grads, graphed.backward_events = self._capture(step, work.backward)
        self._hooks(step, "backward_hooks")
        self._check_used(step, grads)
        count = len(work.wanted)
        graphed.grad_inputs, graphed.grad_parameters = grads[:count], grads[count:]
        if step.module not in self.plan.schedule.scheduled_wgrad:
            graphed.held = list(work.pending)
        before, self.latest_backward = self.latest_backward, graphed
        # A gradient in the memory of one that came in is handed on as a copy: the next pass may have that one's buffer.
        if before is not None and not _meet(before.grad_inputs, before.grad_outputs):
            before.next_backward = self.flight.captured
        self.over.append(step.sample)
        if self.plan.reuse:
            self._bury(graphed, work, step, before)

    def _bury(self, graphed: Graphed, work: Work, step: Step, before: Graphed | None) -> None:
        """Gives the memory back that nobody reads once this backward has been replayed: the gradients of the inputs
        that the backward before this one handed on. Parameters' gradients go where copies of them are handed out."""
        release = self.backend.release
        if before is not None:
            before.grad_inputs = release(before.grad_inputs)
        graphed.grad_parameters = [
            grad if id(p) in work.accumulated or self._stays(p) else release([grad])[0]
            for p, grad in zip(work.parameters, graphed.grad_parameters)
        ]
        if self._last_use(step):
            for t in work.grad_outputs:
                self.buffers.give(t)

    def _stays(self, p: torch.nn.Parameter) -> bool:
        """Whether its gradients are handed out without a copy: all are, or its owner takes them himself, behind
        backward() or backward_dw(), and wants them at one address."""
        return not self.plan.clone_parameter_grads or bool(getattr(p, "skip_backward_post_hook", False))

    @staticmethod
    def _shared(graphed: Graphed, grad: torch.Tensor | None) -> bool:
        """Whether something else lies in a parameter's gradient: what is added to it would be added to that too."""
        others = [*graphed.grad_parameters, *graphed.grad_inputs, *graphed.grad_outputs]
        return _meet([grad], [other for other in others if other is not grad])

    def _bury_results(self) -> list[torch.Tensor]:
        """Those of passes that are over: whatever was made of them is through with its own backward, but a caller may
        look at them until the next call. They take no memory from the backward passes in between, each of which frees
        what its pass saved."""
        found = []
        for sample in self.over if self.plan.reuse else ():
            graphed, work = self.graphed[sample], self.works[sample]
            graphed.outputs = self.backend.release(graphed.outputs)
            work.static_live = []
            found += graphed.outputs
            if work.retain:  # its inputs go with them, no sooner
                self._end_here(graphed)
        self.over = []
        return found

    def _end_here(self, graphed: Graphed) -> None:
        """What its backward reads is kept until now; the position is its own."""
        graphed.end_position, self.flight.captured = self.flight.captured, self.flight.captured + 1

    def _capture_wgrad(self, step: Step) -> None:
        work, graphed = self.works[step.sample], self.graphed[step.sample]
        if not work.pending:
            return
        # Without an entry in the order it may run at any time: neither may its memory be somebody's, nor what it reads.
        apart = step.module not in self.plan.schedule.scheduled_wgrad
        graphed.wgrad_graph, grads, _ = self._capture(step, work.wgrad, apart=apart)
        pairs = [(p, g) for p, g in zip(work.parameters, grads) if g is not None]
        pairs = [(p, g) for p, g in pairs if id(p) not in work.accumulated_later]
        if self.plan.reuse:
            pairs = [(p, g if self._stays(p) else self.backend.release([g], apart=apart)[0]) for p, g in pairs]
        graphed.wgrads = pairs
        graphed.delaying = list(work.delaying)
        if self.plan.reuse and self._last_use(step):
            for t in work.grad_outputs:
                self.buffers.give(t)

    def _place(self, step: Step) -> None:
        """Notes when a step was captured. One without an entry in the order may be replayed at any time."""
        position, self.flight.captured = self.flight.captured, self.flight.captured + 1
        if step.kind != order.WGRAD or step.module in self.plan.schedule.scheduled_wgrad:
            setattr(self.graphed[step.sample], f"{step.kind}_position", position)
        if step.kind == order.WGRAD:
            self.graphed[step.sample].wgrad_captured = position
        if step.kind == order.BACKWARD:
            self.graphed[step.sample].end_position = position

    def _finish(self, graphed: Graphed, work: Work) -> None:
        """What replay needs of a pass; a graph needs nothing else, the CPU keeps its work."""
        graphed.inputs, graphed.wanted = work.inputs, work.wanted
        graphed.addresses, graphed.near = [t.data_ptr() for t in work.inputs], neighbourhood(work.inputs)
        graphed.grad_addresses = [0 if t is None else t.data_ptr() for t in graphed.grad_outputs]
        graphed.grads_near = neighbourhood(graphed.grad_outputs)
        graphed.written = work.written
        graphed.guarded_inputs, graphed.guarded_results = work.guarded_inputs, work.guarded_results
        graphed.guarded_held = work.guarded_held if graphed.backward_graph is not None else []
        if work.quantization.flag is not None:
            own = [p for part in work.parts for p in part.parameters(recurse=False)]
            graphed.kept_weights = [p for p in own if p.dim() == 2]
        if len(self.graphed) > 1 or self.plan.pool is not None:
            graphed.flight = self.flight
        graphed.loans = self.flight.loans
        if work.retain and not self.plan.reuse:  # until all is captured
            self._end_here(graphed)
        graphed.replay_forward = self.backend.replay_of(graphed.forward_graph)
        if graphed.backward_graph is not None:
            graphed.replay_backward = self.backend.replay_of(graphed.backward_graph)
        graphed.parameters, graphed.keeps = work.parameters, work.retain
        graphed.frozen, graphed.without_grad = work.frozen, not work.ambient.grad
        graphed.single = work.form.is_leaf()
        graphed.form, graphed.result, graphed.is_tensor = work.form, work.result, work.is_tensor
        graphed.constant_outputs = [i for i, wants in enumerate(work.differentiable) if not wants]
        if graphed.backward_graph is not None:
            graphed.fused = [Fused.of(p) for p in work.parameters if id(p) in work.accumulated]
            graphed.fused_later = [Fused.of(p) for p in work.parameters if id(p) in work.accumulated_later]
            if graphed.wgrad_graph is not None:
                later = [p for p, _ in graphed.wgrads] + [weight for weight, _ in graphed.fused_later]
                graphed.delayed = frozenset(map(id, later))
        fused = work.accumulated | work.accumulated_later
        if graphed.backward_graph is not None:  # autograd is not to come by parameters that get nothing
            later = fused | {id(p) for p, _ in graphed.wgrads}
            pairs = list(zip(work.parameters, graphed.grad_parameters, strict=True))
            reached = [(p, grad) for p, grad in pairs if grad is not None or id(p) in later]
            graphed.parameters = [p for p, _ in reached]
            graphed.grad_parameters = [grad for _, grad in reached]
        graphed.copied = [
            id(p) not in fused and (not self._stays(p) or self._shared(graphed, grad))
            for p, grad in zip(graphed.parameters, graphed.grad_parameters)
        ]
        pairs = zip(graphed.parameters, graphed.grad_parameters, graphed.copied)
        graphed.static_grads = [
            (p, grad) for p, grad, copied in pairs if not copied and grad is not None and id(p) not in fused
        ]
        graphed.static_wgrads = [(p, grad) for p, grad in graphed.wgrads if self._stays(p)]
        pairs = zip(graphed.grad_parameters, graphed.copied)
        graphed.copied_grads = [grad for grad, copied in pairs if copied and grad is not None]
        graphed.made = own_results(graphed.outputs, work)
        written = [work.inputs[i] for i in work.written]
        graphed.writes = graphed.made + written + graphed.touched + graphed.buried
        handed_out = [grad for grad, copied in zip(graphed.grad_parameters, graphed.copied) if not copied]
        handed_out = [grad for grad in (*graphed.grad_inputs, *handed_out) if grad is not None]
        graphed.backward_writes = handed_out + graphed.touched_backward
        graphed.signature.forget_tensors()
        work.live = []
