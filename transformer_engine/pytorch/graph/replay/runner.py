"""Replays the forward and backward graphs of a captured callable: the hot path.

- Arguments and incoming gradients are copied into static tensors.
- Results are views of static tensors; gradients that a caller may keep are copies.
"""

import torch

from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import foreach_mul, increment_version
from transformer_engine.pytorch.graph.memory.buffers import clone_overlapping_sources, copy_into_static, version_of
from transformer_engine.pytorch.graph.replay.checks import ReplayChecks
from transformer_engine.pytorch.graph.replay.record import CaptureRecord
from transformer_engine.pytorch.graph.replay.wgrad import WgradReplay


class GraphRunner:
    """Fields of the record that the hot path reads are attributes of its own: each lookup costs host time."""

    __slots__ = (
        *("aliased_grads", "backward_graph", "calls", "checks", "forward_graph", "label", "microbatch", "order"),
        *("record", "weight_flag", "wgrad"),
    )

    def __init__(self, record: CaptureRecord, checks: ReplayChecks, wgrad: WgradReplay) -> None:
        self.record, self.checks, self.wgrad = record, checks, wgrad
        self.label, self.microbatch, self.calls = record.label, record.microbatch, record.calls
        self.forward_graph, self.backward_graph = record.forward_graph, record.backward_graph
        self.aliased_grads, self.weight_flag, self.order = record.aliased_grads, record.weight_flag, record.order

    def run_forward(self, given, stream, event, first_microbatch) -> tuple[torch.Tensor, ...]:
        forward, calls, aliased_grads = self.forward_graph, self.calls, self.aliased_grads
        inputs, addresses = forward.inputs, forward.input_addresses
        if aliased_grads.input_grads:
            aliased_grads.copy_out()
        if aliased_grads.last_position >= self.microbatch.forward_position:
            aliased_grads.copy_out_param_grads(self.microbatch.forward_position)
        increment_version(forward.version_bumps)  # before the forward: on a CPU autograd records it
        if stream is None:  # copy_into_static and the replay, inlined: each Python call costs host time
            if self.order is not None and self.order.unfinished is not None:
                self.order.wait(self.record.backend.current_stream())
            low, high = forward.overlap_range
            copies, overlaps = [], False
            for static, address, tensor in zip(inputs, addresses, given):
                at = tensor.data_ptr()
                if at != address:
                    copies.append((static, tensor))
                    if low < at < high:
                        overlaps = True
            for static, tensor in clone_overlapping_sources(copies) if overlaps else copies:
                static.copy_(tensor)
            calls.all_inputs_copied = len(copies) == len(given)
            if self.weight_flag is not None:  # a recomputation uses the quantized weights that exist
                first = first_microbatch and not recompute_phase().recomputing
                self.weight_flag.set(first, self.record.cached_weights)
            forward.replay()
        else:
            calls.all_inputs_copied = False  # unknown: guarded_versions compares the addresses
            wait_for_graph = calls.wait_for_graph or bool(forward.mutated_inputs)
            to_copy = inputs, addresses, forward.overlap_range, given
            self.record.launch(forward.graph, to_copy, stream, None if wait_for_graph else event, first_microbatch)
        for i in forward.mutated_inputs:  # as in eager, the argument itself is written
            if given[i].data_ptr() != addresses[i]:
                given[i].copy_(inputs[i])
        calls.forward_id += 1
        calls.ran_eager = False
        return tuple([t.detach() for t in forward.outputs])

    def guarded_versions(self, given) -> list[tuple[int, int]]:
        """(index, version) of tensors that the caller holds and must not write before the backward: ~i for argument i,
        i for result i."""
        forward = self.forward_graph
        static = [i for i in forward.guarded_inputs if given[i].data_ptr() == forward.input_addresses[i]]
        found = [(~i, version_of(forward.inputs[i])) for i in static]
        return found + [(i, version_of(forward.outputs[i])) for i in forward.guarded_results]

    def _check_backward(self, ctx) -> None:
        record, checks, back, calls = self.record, self.checks, self.backward_graph, self.calls
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.label}: double backward is not supported (backward ran with create_graph=True); run the "
                "callable without its graph if a gradient of a gradient is needed."
            )
        if record.validity.was_reset:
            raise RuntimeError(f"{self.label}: backward after reset(), which dropped its graphs; capture again.")
        if record.peer_channels:
            checks.check_peers()
        if ctx.forward_id != calls.forward_id or (calls.backward_id == calls.forward_id and not back.retain_graph):
            checks.refuse_forward_id(ctx.forward_id)
        if self.microbatch.overwritten_by is not None:
            checks.refuse_overwritten("backward", self.microbatch.overwritten_by)
        if ctx.versions:
            checks.check_versions(ctx.versions)
        if ctx.module_versions != [t._version for t in back.guarded_module_tensors]:
            checks.refuse_module_versions(ctx.module_versions)
        if ctx.weight_versions is not None and ctx.weight_versions != self.weight_flag.versions(record.cached_weights):
            checks.refuse_requantized()

    def run_backward(self, ctx, grads) -> list[torch.Tensor | None]:
        self._check_backward(ctx)
        record, back, calls, aliased_grads = self.record, self.backward_graph, self.calls, self.aliased_grads
        if self.order is not None:
            self.order.enter(record.backward_turn)
        delayed = () if record.wgrad_graph is None else record.wgrad_graph.parameters
        unwanted = self.wgrad.unwanted() if back.fused or delayed else ()
        position = self.microbatch.backward_position
        if record.in_flight is not None:
            record.in_flight.backward(self.microbatch)
        if aliased_grads.input_grads:
            aliased_grads.copy_out(record)
        if aliased_grads.last_position >= position:
            aliased_grads.copy_out_param_grads(position)
        _, stream, first_microbatch, event, watched = ctx.call
        restores = self.wgrad.prepare_main_grads(back.fused, first_microbatch, unwanted) if back.fused else ()
        to_copy = back.grad_outputs, back.grad_addresses, back.overlap_range, grads
        if stream is None:
            if self.order is not None and self.order.unfinished is not None:
                self.order.wait(record.backend.current_stream())
            copy_into_static(*to_copy)
            back.replay()
        else:
            if event is not None and (restores or record.backend.handle_of(event) not in back.events):
                event = None
            record.launch(back.graph, to_copy, stream, event)
        for restore in restores:
            restore()
        if back.version_bumps:
            increment_version(back.version_bumps)
        calls.backward_id = calls.forward_id
        if watched is not None:  # as in eager, scales are updated when the whole backward has ended
            watch, index = watched
            watch.reached(index)
        found = self._returned_grads(ctx.consumers)
        for weight, _ in back.fused:
            if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad") and id(weight) not in unwanted:
                weight.grad_added_to_main_grad = True
        if back.static_grads:
            aliased_grads.alias_param_grads(position, back.static_grads)
        if delayed and not (unwanted and delayed <= unwanted):
            calls.pending_wgrad = stream, first_microbatch, unwanted
        return found

    def _returned_grads(self, consumers) -> list[torch.Tensor | None]:
        """Gradients of inputs and parameters. Those without a consumer are copied, all in one launch."""
        back = self.backward_graph
        static = [grad for grad, consumer in zip(back.grad_inputs, consumers) if consumer is None and grad is not None]
        static += back.copied_grads
        copies = iter(foreach_mul(static, 1) if static else ())  # a product with 1 is exact
        found = [
            None
            if grad is None
            else next(copies)
            if consumer is None
            else self.aliased_grads.alias(grad.detach(), consumer)
            for grad, consumer in zip(back.grad_inputs, consumers)
        ]
        if len(back.copied_grads) == len(back.grad_parameters):
            found += copies
        else:
            found += [
                None if grad is None else next(copies) if copied else grad.detach()
                for grad, copied in zip(back.grad_parameters, back.copied)
            ]
        return found
