"""How the graphs of a captured callable are replayed: what a call, or autograd, was given is copied into the static
tensors, and what comes out is handed on, as a copy where somebody might keep it. The hot path."""

from contextlib import nullcontext

import torch

from transformer_engine.pytorch._internal.recompute_phase import recompute_phase
from transformer_engine.pytorch._internal.torch_private import foreach_mul, increment_version
from transformer_engine.pytorch.graph.backend.interface import Graph
from transformer_engine.pytorch.graph.memory.buffers import apart, fill, version_of


class Replays:
    """Of replay.Graphed, whose attributes these are."""

    __slots__ = ()

    def run_forward(self, given, stream, event, microbatch) -> tuple[torch.Tensor, ...]:
        fore, calls, loans = self.forward_graph, self.calls, self.loans
        inputs, addresses = fore.inputs, fore.addresses
        if loans.out:
            loans.settle()
        if loans.latest >= self.place.forward_position:
            loans.keep_grads(self.place.forward_position)
        increment_version(fore.writes)  # before the work, of which the CPU has history
        if stream is None:  # fill and replay, written out: every call of Python's costs
            low, high = fore.near
            moves, meets = [], False
            for static, address, tensor in zip(inputs, addresses, given):
                at = tensor.data_ptr()
                if at != address:
                    moves.append((static, tensor))
                    if low < at < high:
                        meets = True
            for static, tensor in apart(moves) if meets else moves:
                static.copy_(tensor)
            calls.all_moved = len(moves) == len(given)
            if self.flag is not None:  # a recomputation reads what there is
                self.flag.set(microbatch and not recompute_phase().recomputing, self.kept_weights)
            fore.replay()
        else:
            calls.all_moved = False  # or not: it is looked at again
            whole = calls.whole or bool(fore.written)
            to_fill = inputs, addresses, fore.near, given
            self._launch(fore.graph, to_fill, stream, None if whole else event, microbatch)
        for i in fore.written:  # as eager does
            if given[i].data_ptr() != addresses[i]:
                given[i].copy_(inputs[i])
        calls.turn += 1
        calls.ran_eager = False
        return tuple([t.detach() for t in fore.outputs])

    def versions(self, given) -> list[tuple[int, int]]:
        """(which, how often it was written to) of what a caller holds and may not write to before the backward."""
        fore = self.forward_graph
        held = [i for i in fore.guarded_inputs if given[i].data_ptr() == fore.addresses[i]]
        found = [(~i, version_of(fore.inputs[i])) for i in held]
        return found + [(i, version_of(fore.outputs[i])) for i in fore.guarded_results]

    def _launch(self, graph: Graph, to_fill, stream, event, microbatch=None) -> None:
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

    def run_backward(self, ctx, grads) -> list[torch.Tensor | None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.label}: double backward is not supported (backward ran with create_graph=True); run the "
                "callable without its graph where a gradient of a gradient is needed."
            )
        if self.fitness.gone:
            raise RuntimeError(f"{self.label}: backward after reset(), which dropped its graphs; capture again.")
        if self.channels:
            self._refuse_failed()
        back, later, calls, loans = self.backward_graph, self.wgrad_graph, self.calls, self.loans
        if ctx.turn != calls.turn or (calls.backward_turn == calls.turn and not back.keeps):
            self._refuse_turn(ctx.turn)
        if self.place.spoilt_by is not None:
            self._refuse_spoilt("backward", self.place.spoilt_by)
        if ctx.versions:
            self._check_versions(ctx.versions)
        if ctx.held != [t._version for t in back.guarded_held]:
            self._refuse_held(ctx.held)
        if ctx.kept is not None and ctx.kept != self.flag.made(self.kept_weights):
            self._refuse_kept()
        delayed = () if later is None else later.parameters
        unwanted = self._unwanted() if back.fused or delayed else ()
        if self.flight is not None:
            self.flight.backward(self.place)
        if loans.out:
            loans.settle(self)
        if loans.latest >= self.place.backward_position:
            loans.keep_grads(self.place.backward_position)
        _, stream, microbatch, event, watched = ctx.call
        kept = self._prepare_main_grads(back.fused, microbatch, unwanted) if back.fused else ()
        to_fill = back.grad_outputs, back.grad_addresses, back.near, grads
        if stream is None:
            fill(*to_fill)
            back.replay()
        else:
            if event is not None and (kept or self.backend.handle_of(event) not in back.events):
                event = None
            self._launch(back.graph, to_fill, stream, event)
        for put_back in kept:
            put_back()
        if back.writes:
            increment_version(back.writes)
        calls.backward_turn = calls.turn
        if watched is not None:  # as in eager: scales are made when all of this backward has ended
            watch, place = watched
            watch.reached(place)
        static = [grad for grad, taker in zip(back.grad_inputs, ctx.takers) if taker is None and grad is not None]
        static += back.copied_grads
        # Times 1, which is exact: all copies by one call and one launch.
        copies = iter(foreach_mul(static, 1) if static else ())
        found = [
            None if grad is None else next(copies) if taker is None else loans.lend(grad.detach(), taker)
            for grad, taker in zip(back.grad_inputs, ctx.takers)
        ]
        if len(back.copied_grads) == len(back.grad_parameters):
            found += copies
        else:
            found += [
                None if grad is None else next(copies) if copied else grad.detach()
                for grad, copied in zip(back.grad_parameters, back.copied)
            ]
        for weight, _ in back.fused:
            if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad") and id(weight) not in unwanted:
                weight.grad_added_to_main_grad = True
        if back.static_grads:
            loans.hand_out(self.place.backward_position, back.static_grads)
        if delayed and not (unwanted and delayed <= unwanted):
            calls.wgrad_due = stream, microbatch, unwanted
        return found
