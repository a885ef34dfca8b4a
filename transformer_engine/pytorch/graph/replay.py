"""A captured callable: checks its arguments, copies them into the static tensors, replays. Nothing is captured here."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch._C import _increment_version as increment_version  # torch.autograd.graph's, without a frame of Python's

from transformer_engine.pytorch import capture_flag
from transformer_engine.pytorch.graph.buffers import apart, fill, version_of
from transformer_engine.pytorch.graph.capture_quantization import WeightFlag
from transformer_engine.pytorch.graph.describe import shown
from transformer_engine.pytorch.graph.flight import Flight
from transformer_engine.pytorch.graph.loans import Loans
from transformer_engine.pytorch.graph.replay_arguments import Signature
from transformer_engine.pytorch.graph.replay_refusals import Refusals
from transformer_engine.pytorch.graph.replay_scales import Scales
from transformer_engine.pytorch.graph.weight_grads import Fused, WeightGrads
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization.products import Plan
from transformer_engine.pytorch.quantization.surroundings import STATE
from transformer_engine.pytorch.recompute_phase import recompute_phase


class _Replay(torch.autograd.Function):
    """One node for a captured forward and its backward. Gradients go to the tensors that follow `call`."""

    @staticmethod
    def forward(ctx, call, *surface):
        graphed, given, stream, event, microbatch, watched = call
        ctx.call = graphed, stream, microbatch, event, watched  # without `given`: the inputs are not kept alive
        ctx.takers = [graphed.taker(t.grad_fn) for t in surface[: len(graphed.wanted)]]
        ctx.set_materialize_grads(False)
        outputs = graphed.run_forward(given, stream, event, microbatch)
        ctx.turn = graphed.turn
        ctx.held = [t._version for t in graphed.guarded_held]
        ctx.kept = None if graphed.flag is None else graphed.flag.made(graphed.kept_weights)
        ctx.versions = graphed.versions(given) if graphed.guarded_results or not graphed.all_moved else ()
        if graphed.constant_outputs:
            ctx.mark_non_differentiable(*(outputs[i] for i in graphed.constant_outputs))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.call[0].run_backward(ctx, grads)


# torch's own entry below Function.apply, which looks at every argument for functorch: 3.4 us a call in place of 5.3.
_replay = super(torch.autograd.Function, _Replay).apply


class Graphed(Refusals, WeightGrads):
    """Call it as the callable that it was captured from, with tensors of the same form.

    Three more keywords: is_first_microbatch, as the modules have it; cuda_graph_stream, where to replay (forward and
    backward) instead of on the current stream, which then waits for cuda_graph_event, one that the captured forward
    records, or without one for the end of the graph. A backward waits for it where its graph records it again, behind
    the gradients, else for its end. backward_dw() computes the weight gradients that the latest backward left, on its
    stream, and the current one waits for all of it; reset() gives the graphs and their memory back, which a captured
    module that is only dropped keeps until the garbage collector comes: it and they hold each other. One forward, one
    backward and one backward_dw() at a time: the static tensors hold one pass. Results are views of them, valid until
    the next call; so is a result that is an argument in eager. Graphs captured together, or into one pool, share
    memory: their results are valid until the next call of any of them behind the backward; call them in the order of
    their capture, else a backward raises, and results that nobody goes back from are lost without a word. The graphs
    read parameters where they were: change them in place.
    """

    def __init__(self, label: str, signature: Signature, backend: object, *, eager: Callable, module: object) -> None:
        self.label, self.signature, self.backend = label, signature, backend
        self.eager = eager
        self.module = module if isinstance(module, torch.nn.Module) else None
        self.training = None if self.module is None else module.training
        self.mismatches = 0
        self.ran_eager = False  # the latest call did: what it left is the module's own
        self.flag: WeightFlag | None = None  # each call says whether quantized weights are made anew
        self.kept_weights: list[torch.nn.Parameter] = []  # whose quantized ones all calls of the module share
        self.scales: Scales | None = None
        self.plan: Plan | None = None  # of the recipe that its modules were captured with
        self.gone = False
        self.unfit: str | None = None  # why it cannot be called any more
        self.turn = 0  # of forward replays: a backward belongs to the latest one
        self.backward_turn = 0
        self.flight: Flight | None = None  # where other graphs have the same pool
        self.loans = Loans()
        self.forward_position = self.backward_position = self.end_position = 0
        self.next_backward = -1  # the position of the backward that was captured behind its own
        self.wgrad_position: int | None = None
        self.wgrad_captured = 0  # where it was captured, whether or not the order has an entry for it
        self.whole = False  # a call is followed by the whole graph, whatever event the caller has
        self.spoilt_by: str | None = None  # what wrote over memory of the latest call that its backward reads
        self.wgrad_spoilt_by: str | None = None  # or that its delayed weight gradients read
        self.wgrad_due: tuple | None = None
        self.forward_graph = self.backward_graph = self.wgrad_graph = None
        self.replay_forward: Callable[[], None] | None = None  # of the graphs, without a frame of Python between
        self.replay_backward: Callable[[], None] | None = None
        self.forward_events: frozenset = frozenset()  # the handles of those that they record
        self.backward_events: frozenset = frozenset()
        self.inputs: list[torch.Tensor] = []
        self.addresses: list[int] = []  # of the inputs
        self.near = self.grads_near = 0, 0  # where what overlaps an input, or an incoming gradient, begins
        self.written: list[int] = []  # inputs that the forward writes to
        self.touched: list[torch.Tensor] = []  # parameters and buffers that the forward writes to
        self.touched_backward: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []  # what a forward's replay writes to without torch's counting it
        self.backward_writes: list[torch.Tensor] = []
        self.guarded_inputs: list[int] = []  # which, and which outputs, nobody may write to before the backward
        self.guarded_results: list[int] = []
        self.guarded_held: list[torch.Tensor] = []  # parameters and buffers that the backward reads
        self.all_moved = False  # the latest call was given no static input itself
        self.wanted: list[int] = []
        self.parameters: list[torch.nn.Parameter] = []
        self.frozen: list[torch.nn.Parameter] = []  # those that wanted no gradient
        self.without_grad = False  # captured under no_grad
        self.outputs: list[torch.Tensor] = []
        self.made: list[torch.Tensor] = []  # those that are no argument, parameter or buffer
        self.buried: list[torch.Tensor] = []  # results of earlier passes that are over: their memory may be its own
        self.constant_outputs: list[int] = []
        self.grad_outputs: list[torch.Tensor | None] = []  # one for each output
        self.grad_addresses: list[int] = []  # of these
        self.grad_inputs: list[torch.Tensor | None] = []  # of the wanted inputs
        self.grad_parameters: list[torch.Tensor | None] = []
        self.copied: list[bool] = []  # which of the parameters' are handed out as copies
        self.copied_grads: list[torch.Tensor] = []  # those
        # Parameters whose gradients are handed out without a copy, and those: the backward's, and backward_dw()'s.
        self.static_grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.static_wgrads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.form = None  # of the result
        self.single = False  # it is one tensor
        self.result: list[object] = []  # its leaves; None where a tensor stands
        self.is_tensor: list[bool] = []
        self.keeps = False  # a backward may run again
        self.offloads = False  # graphs of its capture copy what layers save to the host and back
        self.wgrads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self.fused: list[Fused] = []  # whose gradients the backward adds to main_grad
        self.fused_later: list[Fused] = []  # and backward_dw()
        self.delaying: list[TransformerEngineBaseModule] = []
        self.delayed: frozenset[int] = frozenset()  # parameters (by id) whose gradients backward_dw() computes
        self.held: list[object] = []  # what backward_dw()'s graph reads, where it may run at any time
        self.on_reset: Callable[[], object] | None = None

    # ---- forward ----

    def __call__(
        self, *args, is_first_microbatch=None, cuda_graph_stream=None, cuda_graph_event=None, **kwargs
    ) -> object:
        if self.unfit is not None:
            raise RuntimeError(f"{self.label}: {self.unfit}")
        if capture_flag._capturing:
            self._refuse_capturing()
        if self.module is not None and self.module.training is not self.training:
            return self._other_mode(args, kwargs, is_first_microbatch)
        if self.flag is not None and is_first_microbatch is None:
            raise TypeError(
                f"{self.label}: captured with cache_quantized_params=True, so each call has to say "
                "'is_first_microbatch'; pass True where the weights have changed since the last call, else False."
            )
        if cuda_graph_stream is not None or cuda_graph_event is not None:
            self._check_stream(cuda_graph_stream, cuda_graph_event)
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise ValueError(
                f"{self.label}: argument 'is_first_microbatch' is {shown(is_first_microbatch)}, wanted True or False."
            )
        if self.plan is not None and STATE.enabled:
            self._check_recipe()
        given = self.signature.match(args, kwargs)
        if self.wgrad_due is not None:
            raise RuntimeError(
                f"{self.label}: called while the weight gradients of its last backward wait for backward_dw(), which "
                "reads what this call overwrites; call backward_dw() first (drop_backward_dw() where that step was "
                "left), or capture a pass for each microbatch by '_order'."
            )
        if self.offloads and (recompute_phase().enabled or torch._C._current_graph_task_id() != -1):
            self._refuse_recomputation()
        grad = torch.is_grad_enabled()
        backward = grad and self.backward_graph is not None
        if backward:
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{self.label}: called under a torch.func transform, which a graph cannot follow; reset() it first."
                )
            if self.frozen:
                self._check_frozen()
        elif grad:
            self._check_nothing_wanted()
        watched = alone = put_back = None  # alone: a region of this call's own, where there is none around it
        if self.scales.parts:
            phase = recompute_phase()
            if phase.recomputing or not (grad or phase.enabled):
                if cuda_graph_stream is not None:  # its last replay may still write amaxes, and read scales
                    self.backend.current_stream().wait_stream(cuda_graph_stream)
                if phase.recomputing:
                    watched, put_back = self.scales.again(phase)
                else:
                    put_back = self.scales.noted_rows()
                self.whole = True
            elif phase.enabled:
                watched, alone = self.scales.first_run(phase, backward)
            elif backward:
                watched, alone = self.scales.join()
            else:
                alone = self.scales.enter()[1]
        try:
            if self.flight is not None:
                self.flight.forward(self, backward)
            if backward:
                call = self, given, cuda_graph_stream, cuda_graph_event, is_first_microbatch, watched
                outputs = _replay(call, *[given[i] for i in self.wanted], *self.parameters)
            else:
                with torch.no_grad():
                    outputs = self.run_forward(given, cuda_graph_stream, cuda_graph_event, is_first_microbatch)
                    if not grad and self.flight is not None and recompute_phase().enabled:
                        # Recomputations of other passes come out of the order, and write where these lie.
                        outputs = tuple([t.clone() for t in outputs])
        finally:
            if put_back is not None:
                put_back()
                self.whole = False
        if alone is not None:
            alone.update_forward()
        return outputs[0] if self.single else self.assemble(outputs)

    def taker(self, producer: object | None) -> "Graphed | None":
        """Whose backward gets the gradient of an argument without a copy, by the node that made the argument: another
        replay takes it into static memory of its own. Anything else might keep it, as its .grad or on the way there,
        and the next replay writes over it; so may graphs of one memory that come before that backward, or are it."""
        if type(producer) is not _Replay._backward_cls:
            return None
        other = producer.call[0]
        return other if other.loans is not self.loans or other.backward_position == self.next_backward else None

    def assemble(self, outputs: tuple[torch.Tensor, ...]) -> object:
        tensors = iter(outputs)
        return self.form.unflatten(next(tensors) if t else leaf for t, leaf in zip(self.is_tensor, self.result))

    def run_forward(self, given, stream, event, microbatch) -> tuple[torch.Tensor, ...]:
        if self.loans.out:
            self.loans.settle()
        if self.loans.latest >= self.forward_position:
            self.loans.keep_grads(self.forward_position)
        increment_version(self.writes)  # before the work, of which the CPU has history
        if stream is None:  # fill and replay, written out: every call of Python's costs
            low, high = self.near
            moves, meets = [], False
            for static, address, tensor in zip(self.inputs, self.addresses, given):
                at = tensor.data_ptr()
                if at != address:
                    moves.append((static, tensor))
                    if low < at < high:
                        meets = True
            for static, tensor in apart(moves) if meets else moves:
                static.copy_(tensor)
            self.all_moved = len(moves) == len(given)
            if self.flag is not None:  # a recomputation reads what there is
                self.flag.set(microbatch and not recompute_phase().recomputing, self.kept_weights)
            self.replay_forward()
        else:
            self.all_moved = False  # or not: it is looked at again
            to_fill = self.inputs, self.addresses, self.near, given
            whole = self.whole or bool(self.written)
            self._launch(self.forward_graph, to_fill, stream, None if whole else event, microbatch)
        for i in self.written:  # as eager does
            if given[i].data_ptr() != self.addresses[i]:
                given[i].copy_(self.inputs[i])
        self.turn += 1
        self.ran_eager = False
        return tuple([t.detach() for t in self.outputs])

    def versions(self, given) -> list[tuple[int, int]]:
        """(which, how often it was written to) of what a caller holds and may not write to before the backward."""
        held = [i for i in self.guarded_inputs if given[i].data_ptr() == self.addresses[i]]
        found = [(~i, version_of(self.inputs[i])) for i in held]
        return found + [(i, version_of(self.outputs[i])) for i in self.guarded_results]

    def _launch(self, graph, to_fill, stream, event, microbatch=None) -> None:
        """Fills what is to be filled, then replays; on a stream of its own, the current one waits behind it.
        microbatch: of a forward, for the flag of its weights."""
        current = self.backend.current_stream()
        beside = stream is not None and stream != current
        if beside:
            stream.wait_stream(current)
        # The copies and the flag too: the tail of the last replay may still read what they write.
        with self.backend.on(stream) if beside else nullcontext():
            fill(*to_fill)
            if self.flag is not None and microbatch is not None:
                self.flag.set(microbatch and not recompute_phase().recomputing, self.kept_weights)
            graph.replay()
        if not beside:
            return
        if event is None:
            current.wait_stream(stream)
        else:
            current.wait_event(event)

    # ---- backward ----

    def run_backward(self, ctx, grads) -> list[torch.Tensor | None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.label}: double backward is not supported (backward ran with create_graph=True); run the "
                "callable without its graph where a gradient of a gradient is needed."
            )
        if self.gone:
            raise RuntimeError(f"{self.label}: backward after reset(), which dropped its graphs; capture again.")
        if ctx.turn != self.turn or (self.backward_turn == self.turn and not self.keeps):
            self._refuse_turn(ctx.turn)
        if self.spoilt_by is not None:
            self._refuse_spoilt("backward", self.spoilt_by)
        if ctx.versions:
            self._check_versions(ctx.versions)
        if ctx.held != [t._version for t in self.guarded_held]:
            self._refuse_held(ctx.held)
        if ctx.kept is not None and ctx.kept != self.flag.made(self.kept_weights):
            self._refuse_kept()
        unwanted = self._unwanted() if self.fused or self.delayed else ()
        if self.flight is not None:
            self.flight.backward(self)
        if self.loans.out:
            self.loans.settle(self)
        if self.loans.latest >= self.backward_position:
            self.loans.keep_grads(self.backward_position)
        _, stream, microbatch, event, watched = ctx.call
        kept = self._prepare_main_grads(self.fused, microbatch, unwanted) if self.fused else ()
        to_fill = self.grad_outputs, self.grad_addresses, self.grads_near, grads
        if stream is None:
            fill(*to_fill)
            self.replay_backward()
        else:
            if event is not None and (kept or self.backend.handle_of(event) not in self.backward_events):
                event = None
            self._launch(self.backward_graph, to_fill, stream, event)
        for put_back in kept:
            put_back()
        if self.backward_writes:
            increment_version(self.backward_writes)
        self.backward_turn = self.turn
        if watched is not None:  # as in eager: scales are made when all of this backward has ended
            watch, place = watched
            watch.reached(place)
        static = [grad for grad, taker in zip(self.grad_inputs, ctx.takers) if taker is None and grad is not None]
        static += self.copied_grads
        # Times 1, which is exact: all copies by one call and one launch.
        copies = iter(torch._foreach_mul(static, 1) if static else ())
        found = [
            None if grad is None else next(copies) if taker is None else self.loans.lend(grad.detach(), taker)
            for grad, taker in zip(self.grad_inputs, ctx.takers)
        ]
        if len(self.copied_grads) == len(self.grad_parameters):
            found += copies
        else:
            found += [
                None if grad is None else next(copies) if copied else grad.detach()
                for grad, copied in zip(self.grad_parameters, self.copied)
            ]
        for weight, _ in self.fused:
            if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad") and id(weight) not in unwanted:
                weight.grad_added_to_main_grad = True
        if self.static_grads:
            self.loans.hand_out(self.backward_position, self.static_grads)
        if self.delayed and not (unwanted and self.delayed <= unwanted):
            self.wgrad_due = stream, microbatch, unwanted
        return found

    # ---- the end ----

    def reset(self) -> None:
        """Drops the graphs and the static tensors; a module runs without graph again. Twice is once."""
        if self.gone:
            return
        self.loans.settle()
        self.gone, self.unfit = True, "called after reset(), which dropped its graphs; capture again."
        for graph in (self.forward_graph, self.backward_graph, self.wgrad_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.replay_forward = self.replay_backward = None
        self.inputs, self.outputs, self.grad_outputs, self.buried, self.made = [], [], [], [], []
        self.grad_inputs, self.grad_parameters, self.copied_grads, self.wgrads = [], [], [], []
        self.touched, self.touched_backward, self.writes, self.backward_writes = [], [], [], []
        self.held, self.wgrad_due, self.static_grads, self.static_wgrads = [], None, [], []
        if self.on_reset is not None:
            self.on_reset()

    def __deepcopy__(self, memo):
        raise RuntimeError(f"{self.label}: a captured callable cannot be copied or pickled; reset() it first.")

    def __reduce__(self):
        self.__deepcopy__(None)
