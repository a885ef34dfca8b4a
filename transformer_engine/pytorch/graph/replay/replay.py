"""A captured callable at a call: has the arguments checked (arguments.Signature.match), looks at what else it
may not be (refusals.py), and has the graphs replayed (graphs.py). Nothing is captured here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import are_functorch_transforms_active, current_graph_task_id
from transformer_engine.pytorch.graph.backend.interface import Backend
from transformer_engine.pytorch.graph.describe import shown
from transformer_engine.pytorch.graph.memory.flight import Flight, Pass
from transformer_engine.pytorch.graph.memory.loans import Loans
from transformer_engine.pytorch.graph.recorded.calls import Calls, Fitness
from transformer_engine.pytorch.graph.recorded.captured import BackwardGraph, ForwardGraph, WeightGradGraph
from transformer_engine.pytorch.graph.recorded.weight_flag import WeightFlag
from transformer_engine.pytorch.graph.replay.arguments import Signature
from transformer_engine.pytorch.graph.replay.graphs import Replays
from transformer_engine.pytorch.graph.replay.refusals import Refusals
from transformer_engine.pytorch.graph.replay.scales import Scales
from transformer_engine.pytorch.graph.replay.weight_grads import WeightGrads
from transformer_engine.pytorch.quantization.recipes.products import Plan
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class _Replay(torch.autograd.Function):
    """One node for a captured forward and its backward. Gradients go to the tensors that follow `call`."""

    @staticmethod
    def forward(ctx, call, *surface):
        graphed, given, stream, event, microbatch, watched = call
        ctx.call = graphed, stream, microbatch, event, watched  # without `given`: the inputs are not kept alive
        ctx.takers = [graphed.taker(t.grad_fn) for t in surface[: len(graphed.wanted)]]
        ctx.set_materialize_grads(False)
        outputs = graphed.run_forward(given, stream, event, microbatch)
        ctx.turn = graphed.calls.turn
        ctx.held = [t._version for t in graphed.backward_graph.guarded_held]
        ctx.kept = None if graphed.flag is None else graphed.flag.made(graphed.kept_weights)
        fore = graphed.forward_graph
        ctx.versions = graphed.versions(given) if fore.guarded_results or not graphed.calls.all_moved else ()
        if fore.constant_outputs:
            ctx.mark_non_differentiable(*(outputs[i] for i in fore.constant_outputs))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.call[0].run_backward(ctx, grads)


# torch's own entry below Function.apply, which looks at every argument for functorch: 3.4 us a call in place of 5.3.
_replay = super(torch.autograd.Function, _Replay).apply


@dataclass(frozen=True, eq=False, repr=False)
class _Record:
    """What a capture has made: written once. Whoever holds a captured callable may set attributes of his own on it."""

    label: str
    signature: Signature
    backend: Backend
    eager: Callable
    module: torch.nn.Module | None
    training: bool | None
    forward_graph: ForwardGraph
    backward_graph: BackwardGraph | None
    wgrad_graph: WeightGradGraph | None
    wanted: list[int]  # inputs that want a gradient
    parameters: list[torch.nn.Parameter]  # that get one
    frozen: list[torch.nn.Parameter]  # that wanted none
    without_grad: bool  # captured under torch.no_grad()
    offloads: bool  # graphs of its capture copy what layers save to the host and back
    channels: list[_C.PeerChannel]  # to peers, over which its graphs communicate
    plan: Plan | None  # of the recipe that its modules were captured with
    scales: Scales
    flag: WeightFlag | None  # each call says whether quantized weights are made anew
    kept_weights: list[torch.nn.Parameter]  # whose quantized ones all calls of the module share
    flight: Flight | None  # where other graphs have the same pool
    loans: Loans
    place: Pass  # among the captures of the pool
    calls: Calls
    fitness: Fitness


class Graphed(_Record, Replays, Refusals, WeightGrads):
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

    def __call__(
        self, *args, is_first_microbatch=None, cuda_graph_stream=None, cuda_graph_event=None, **kwargs
    ) -> object:
        if self.fitness.unfit is not None:
            raise RuntimeError(f"{self.label}: {self.fitness.unfit}")
        if is_graph_capturing():
            self._refuse_capturing()
        if self.channels:
            self._refuse_failed()
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
        if current_state().enabled:
            if self.plan is not None:
                self._check_recipe()
            elif not self.calls.told:
                self._tell_of_autocast()
        given = self.signature.match(args, kwargs)
        calls = self.calls
        if calls.wgrad_due is not None:
            raise RuntimeError(
                f"{self.label}: called while the weight gradients of its last backward wait for backward_dw(), which "
                "reads what this call overwrites; call backward_dw() first (drop_backward_dw() where that step was "
                "left), or capture a pass for each microbatch by '_order'."
            )
        if self.offloads and (recompute_phase().enabled or current_graph_task_id() != -1):
            self._refuse_recomputation()
        grad = torch.is_grad_enabled()
        backward = grad and self.backward_graph is not None
        if backward:
            if are_functorch_transforms_active():
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
                calls.whole = True
            elif phase.enabled:
                watched, alone = self.scales.first_run(phase, backward)
            elif backward:
                watched, alone = self.scales.join()
            else:
                alone = self.scales.enter()[1]
        try:
            if self.flight is not None:
                self.flight.forward(self.place, backward)
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
                calls.whole = False
        if alone is not None:
            alone.update_forward()
        fore = self.forward_graph
        return outputs[0] if fore.single else fore.assemble(outputs)

    def taker(self, producer: object | None) -> "Graphed | None":
        """Whose backward gets the gradient of an argument without a copy, by the node that made the argument: another
        replay takes it into static memory of its own. Anything else might keep it, as its .grad or on the way there,
        and the next replay writes over it; so may graphs of one memory that come before that backward, or are it."""
        if type(producer) is not _Replay._backward_cls:
            return None
        other = producer.call[0]
        if other.loans is not self.loans or other.place.backward_position == self.backward_graph.next_position:
            return other
        return None

    def reset(self) -> None:
        """Drops the graphs and the static tensors; a module runs without graph again. Twice is once."""
        fitness = self.fitness
        if fitness.gone:
            return
        self.loans.settle()
        fitness.gone, fitness.unfit = True, "called after reset(), which dropped its graphs; capture again."
        for graph in (self.forward_graph, self.backward_graph, self.wgrad_graph):
            if graph is not None:
                graph.drop()
        self.place.made.clear()
        self.channels.clear()
        self.calls.wgrad_due = None
        if fitness.on_reset is not None:
            fitness.on_reset()

    def __deepcopy__(self, memo):
        raise RuntimeError(f"{self.label}: a captured callable cannot be copied or pickled; reset() it first.")

    def __reduce__(self):
        self.__deepcopy__(None)
