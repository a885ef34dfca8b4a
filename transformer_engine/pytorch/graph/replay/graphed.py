"""Graphed: a captured callable. A call checks its arguments and its context, then replays the graphs.

- Nothing is captured here.
- Parts: Signature checks the arguments, ReplayChecks the rest, GraphRunner replays forward and backward, WgradReplay
  replays delayed weight gradients. They share one CaptureRecord, and none of them refers to Graphed.
"""

import torch

from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing
from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import are_functorch_transforms_active, current_graph_task_id
from transformer_engine.pytorch.graph.describe import short_repr
from transformer_engine.pytorch.graph.replay.checks import ReplayChecks
from transformer_engine.pytorch.graph.replay.record import CaptureRecord
from transformer_engine.pytorch.graph.replay.runner import GraphRunner
from transformer_engine.pytorch.graph.replay.wgrad import WgradReplay
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class _Replay(torch.autograd.Function):
    """One autograd node for a captured forward and its backward. The inputs after `call` get gradients."""

    @staticmethod
    def forward(ctx, call, *inputs):
        runner, given, stream, event, first_microbatch, watched = call
        ctx.call = (
            runner,
            stream,
            first_microbatch,
            event,
            watched,
        )  # without `given`, so that inputs are not kept alive
        record = runner.record
        ctx.consumers = [consumer_of(runner, t.grad_fn) for t in inputs[: len(record.inputs_requiring_grad)]]
        ctx.set_materialize_grads(False)
        outputs = runner.run_forward(given, stream, event, first_microbatch)
        ctx.forward_id = runner.calls.forward_id
        ctx.module_versions = [t._version for t in runner.backward_graph.guarded_module_tensors]
        weight_flag, forward_graph = runner.weight_flag, runner.forward_graph
        ctx.weight_versions = None if weight_flag is None else weight_flag.versions(record.cached_weights)
        guarded = forward_graph.guarded_results or not runner.calls.all_inputs_copied
        ctx.versions = runner.guarded_versions(given) if guarded else ()
        if forward_graph.non_differentiable_outputs:
            ctx.mark_non_differentiable(*(outputs[i] for i in forward_graph.non_differentiable_outputs))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.call[0].run_backward(ctx, grads)


# torch's own entry below Function.apply, which checks every argument for functorch: 3.4 us a call instead of 5.3.
_replay = super(torch.autograd.Function, _Replay).apply


def consumer_of(runner: GraphRunner, producer: object | None) -> CaptureRecord | None:
    """The record of the callable whose backward gets the gradient of an argument without a copy; None for a copy.
    producer: the node that made the argument.

    - Only another replay qualifies, which copies the gradient into static memory of its own. Other nodes may keep it,
      for example as a .grad, and the next replay would overwrite it.
    - If both share memory, its backward has to be the one that was captured next: others in between could write there.
    """
    if type(producer) is not _Replay._backward_cls:
        return None
    other = producer.call[0]
    if (
        other.aliased_grads is not runner.aliased_grads
        or other.microbatch.backward_position == runner.backward_graph.next_backward_position
    ):
        return other.record
    return None


class Graphed:
    """Call it as the callable that it was captured from, with tensors of the same shapes, strides and dtypes.

    Three more keywords: is_first_microbatch, as for the modules; cuda_graph_stream, where forward and backward are
    replayed instead of on the current stream; cuda_graph_event, an event that the captured forward records. The current
    stream waits for the event, or without one for the end of the graph. A backward waits for the event if its graph
    records it again, after the gradients, and otherwise for the end of the graph.

    - backward_dw() computes the weight gradients that the latest backward delayed, on its stream; the current stream
      waits for all of it.
    - reset() releases the graphs and their memory. A captured module and its graphs refer to each other, so that
      without reset() they live until the garbage collector runs.
    - One forward, one backward and one backward_dw() at a time: the static tensors hold one microbatch.
    - Results are views of static tensors, valid until the next call, also where eager returns an argument itself.
    - Graphs captured together, or into one pool, share memory. Their results are valid until the next call of any of
      them after the backward. Call them in the order of their capture: otherwise a backward raises, and outputs not
      used in a backward are overwritten without an error.
    - The graphs read parameters at the addresses of the capture: change parameters in place.
    """

    def __init__(self, **fields: object) -> None:
        """fields: those of CaptureRecord."""
        self.record = record = CaptureRecord(**fields)
        self._checks = ReplayChecks(record)
        self._wgrad = WgradReplay(record, self._checks)
        self._runner = GraphRunner(record, self._checks, self._wgrad)

    def __call__(
        self, *args, is_first_microbatch=None, cuda_graph_stream=None, cuda_graph_event=None, **kwargs
    ) -> object:
        record, checks = self.record, self._checks
        calls = record.calls
        if record.validity.invalid is not None:
            raise RuntimeError(f"{record.label}: {record.validity.invalid}")
        if is_graph_capturing():
            checks.refuse_capturing()
        if record.peer_channels:
            checks.check_peers()
        if record.module is not None and record.module.training is not record.training:
            return checks.run_eager(args, kwargs, is_first_microbatch)
        if record.weight_flag is not None and is_first_microbatch is None:
            raise TypeError(
                f"{record.label}: captured with cache_quantized_params=True, so each call needs the argument "
                "'is_first_microbatch'; pass True if the weights have changed since the last call, else False."
            )
        if cuda_graph_stream is not None or cuda_graph_event is not None:
            checks.check_stream(cuda_graph_stream, cuda_graph_event)
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise ValueError(
                f"{record.label}: argument 'is_first_microbatch' is {short_repr(is_first_microbatch)}, wanted True or "
                "False."
            )
        if current_state().enabled:
            if record.recipe_plan is not None:
                checks.check_recipe()
            elif not calls.warned_autocast:
                checks.warn_of_autocast()
        given = record.signature.match(args, kwargs)
        if calls.pending_wgrad is not None:
            raise RuntimeError(
                f"{record.label}: called while the weight gradients of its last backward wait for backward_dw(), which "
                "reads memory that this call overwrites; call backward_dw() first (drop_backward_dw() if that step was "
                "abandoned), or capture several microbatches with '_order'."
            )
        if record.offloads and (recompute_phase().enabled or current_graph_task_id() != -1):
            checks.refuse_recomputation()
        grad = torch.is_grad_enabled()
        backward = grad and record.backward_graph is not None
        if backward:
            if are_functorch_transforms_active():
                raise NotImplementedError(
                    f"{record.label}: called under a torch.func transform, which a graph does not support; reset() it "
                    "first."
                )
            if record.frozen:
                checks.check_frozen()
        elif grad:
            checks.check_no_grad()
        for wait in record.weight_waits:
            wait()
        watched = own_region = restore_scales = None
        if record.scales.parts:
            watched, own_region, restore_scales = self._enter_scales(grad, backward, cuda_graph_stream)
        try:
            if record.order is not None:
                record.order.enter(record.forward_turn)
            if record.in_flight is not None:
                record.in_flight.forward(record.microbatch, backward)
            if backward:
                call = self._runner, given, cuda_graph_stream, cuda_graph_event, is_first_microbatch, watched
                outputs = _replay(call, *[given[i] for i in record.inputs_requiring_grad], *record.parameters)
            else:
                outputs = self._run_no_grad(grad, given, cuda_graph_stream, cuda_graph_event, is_first_microbatch)
        finally:
            if restore_scales is not None:
                restore_scales()
                calls.wait_for_graph = False
        if own_region is not None:
            own_region.update_forward()
        forward_graph = record.forward_graph
        return outputs[0] if forward_graph.returns_one_tensor else forward_graph.assemble(outputs)

    def _enter_scales(self, grad: bool, backward: bool, stream: object | None) -> tuple:
        """Under delayed scaling: (what the backward reports to, the region of this call if no autocast surrounds it,
        a function that restores scales after the forward)."""
        record, scales, phase = self.record, self.record.scales, recompute_phase()
        if phase.recomputing or not (grad or phase.enabled):
            if stream is not None:  # its last replay may still write amaxes and read scales
                record.backend.current_stream().wait_stream(stream)
            record.calls.wait_for_graph = True
            if phase.recomputing:
                watched, restore_scales = scales.recompute(phase)
                return watched, None, restore_scales
            return None, None, scales.restore_amaxes()
        if phase.enabled:
            return *scales.first_run(phase, backward), None
        if backward:
            return *scales.join_region(), None
        return None, scales.enter_region()[1], None

    @torch.no_grad()
    def _run_no_grad(self, grad: bool, *call: object) -> tuple[torch.Tensor, ...]:
        """Without an autograd node. grad: whether the caller has gradients enabled."""
        outputs = self._runner.run_forward(*call)
        if not grad and self.record.in_flight is not None and recompute_phase().enabled:
            # The first run of a checkpoint: recomputations run out of order and overwrite these results.
            return tuple([t.clone() for t in outputs])
        return outputs

    def backward_dw(self) -> None:
        """Computes the weight gradients that the latest backward delayed. RuntimeError if none did."""
        self._wgrad.backward_dw()

    def drop_backward_dw(self) -> None:
        """Drops delayed weight gradients, for a step that is abandoned."""
        self._wgrad.drop_backward_dw()

    def need_backward_dw(self) -> bool:
        """Whether backward_dw() computes weight gradients."""
        return self._wgrad.need_backward_dw()

    def reset(self) -> None:
        """Drops the graphs and the static tensors; a module runs without graph again. A second call does nothing."""
        record, validity = self.record, self.record.validity
        if validity.was_reset:
            return
        record.aliased_grads.copy_out()
        validity.was_reset, validity.invalid = True, "called after reset(), which dropped its graphs; capture again."
        for graph in (record.forward_graph, record.backward_graph, record.wgrad_graph):
            if graph is not None:
                graph.drop()
        record.microbatch.outputs.clear()
        record.peer_channels.clear()
        record.calls.pending_wgrad = None
        if validity.on_reset is not None:
            validity.on_reset()

    def __deepcopy__(self, memo):
        raise RuntimeError(f"{self.record.label}: a captured callable cannot be copied or pickled; reset() it first.")

    def __reduce__(self):
        self.__deepcopy__(None)
