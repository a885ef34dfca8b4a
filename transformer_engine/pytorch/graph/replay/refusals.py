"""What else a call of a captured callable, or its backward, may not be (another mode, recipe or stream, a spoilt pass):
refused by name before anything is copied or changed. Its arguments are arguments.py's. Replays nothing."""

import inspect
import warnings

from transformer_engine.pytorch.graph.describe import shown
from transformer_engine.pytorch.graph.memory.buffers import version_of
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class Refusals:
    """Of replay.Graphed, whose attributes these are."""

    __slots__ = ()

    def _refuse_capturing(self) -> None:
        if getattr(self.eager, "running", False):
            raise RuntimeError(
                f"{self.label}: called by the __call__ of its module's class, which it is running without the graph; "
                "let that choose by is_graph_capturing() first what is captured of it."
            )
        raise RuntimeError(
            f"{self.label}: called inside another capture, or its warm-up, which a graph cannot be part of; reset() it "
            "first and capture all of it at once."
        )

    def _refuse_failed(self) -> None:
        """CommTimeout where the ranks do not hear each other any more: a replay would be NaN."""
        for channel in self.channels:
            channel.refuse_failed()

    def _check_recipe(self) -> None:
        """The autocast around a replay is the captured one's, or none."""
        plan = current_state().chosen_plan()
        if plan is not self.plan and plan.recipe != self.plan.recipe:
            raise RuntimeError(
                f"{self.label}: called in an autocast with another recipe ({plan.recipe}) than it was captured with "
                f"({self.plan.recipe}), which is part of the graph; call it in that one (its functions the same "
                "objects), or capture again."
            )

    def _tell_of_autocast(self) -> None:
        """Once: an autocast around the replay of a graph that was captured without one."""
        self.calls.told = True
        if any(part._products for part in our_modules(self.module)):
            warnings.warn(
                f"{self.label}: called in te.autocast, but captured without: it runs as it was captured, not in FP8. "
                "Capture it with enabled=True and that recipe, or call it outside of the autocast.",
                UserWarning,
                stacklevel=3,
            )

    def _refuse_recomputation(self) -> None:
        raise RuntimeError(
            f"{self.label}: called inside of a checkpoint, but graphs that were captured with it copy what layers save "
            "to the host and back, in memory that is right in the order of the captures alone, and a recomputation "
            "comes out of it; put the checkpoint inside of what is captured, or capture without CPU offload."
        )

    def _refuse_turn(self, turn: int) -> None:
        """A backward of a call whose static tensors hold another one, or nothing."""
        if turn == self.calls.turn:
            raise RuntimeError(
                f"{self.label}: backward of a call whose tensors are gone: it ran already. Run it once; "
                "retain_graph_in_backward=True captures one that runs again."
            )
        raise RuntimeError(
            f"{self.label}: backward of a call whose tensors are gone: another call came behind it. Run it between "
            "this call and the next; '_order' captures a pass for each microbatch. The recomputation of "
            "torch.utils.checkpoint(use_reentrant=False) is such a call: use te.checkpoint or use_reentrant=True, or "
            "capture the checkpoint with what is in it."
        )

    def _other_mode(self, args: tuple, kwargs: dict, is_first_microbatch: bool | None) -> object:
        modes = {True: "train", False: "eval"}
        self.calls.mismatches += 1
        warnings.warn(
            f"{self.label}: captured in {modes[self.training]} mode, called in {modes[not self.training]} mode: runs "
            f"without the graph, {self.calls.mismatches} times so far.",
            stacklevel=3,
        )
        if is_first_microbatch is not None and "is_first_microbatch" in inspect.signature(self.eager).parameters:
            kwargs = {**kwargs, "is_first_microbatch": is_first_microbatch}
        self.calls.ran_eager = True
        return self.eager(*args, **kwargs)

    def _check_stream(self, stream: object | None, event: object | None) -> None:
        if stream is not None and not self.backend.is_stream(stream):
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_stream' is {shown(stream)}, wanted a torch.cuda.Stream of the "
                "device that it was captured on."
            )
        if event is None:
            return
        if not self.backend.is_event(event):
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' is {shown(event)}, wanted the torch.cuda.Event(external="
                "True) that the captured region records."
            )
        if stream is None or stream == self.backend.current_stream():
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' was given without a stream of the graph's own, where it "
                "would wait for nothing; pass that stream as 'cuda_graph_stream', or leave the event out."
            )
        if self.backend.handle_of(event) not in self.forward_graph.events:
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' is an event that the captured forward does not record, so "
                "that the results would be read early; record it there, a torch.cuda.Event(external=True), or leave it "
                "out to wait for the whole graph."
            )

    def _check_frozen(self) -> None:
        thawed = [list(p.shape) for p in self.frozen if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{self.label}: parameters of shapes {thawed} want a gradient now, which they did not when it was "
                "captured, and its backward has none for them; freeze them again, or capture again."
            )

    def _check_nothing_wanted(self) -> None:
        """Where no backward was captured, and the call would record one in eager."""
        self._check_frozen()
        if not self.without_grad:
            return
        wanted = [self.signature.names[self.signature.slots[i]] for i in self.wanted]
        wanted += [f"a parameter of shape {list(p.shape)}" for p in self.parameters if p.requires_grad]
        if wanted:
            raise RuntimeError(
                f"{self.label}: captured under torch.no_grad(), so without a backward; called with gradients, which "
                f"{wanted[0]} wants. Call it under torch.no_grad(), or capture it with gradients."
            )

    def _check_versions(self, versions: list[tuple[int, int]]) -> None:
        fore = self.forward_graph
        for i, version in versions:
            if version_of(fore.outputs[i] if i >= 0 else fore.inputs[~i]) != version:
                name = f"result {i}" if i >= 0 else self.signature.names[self.signature.slots[~i]]
                raise RuntimeError(
                    f"{self.label}: {name} was written to in place between the call and its backward, which reads it, "
                    "or does not know of the write (it shares memory with an argument, a parameter or another result); "
                    "write to a copy."
                )

    def _refuse_held(self, versions: list[int]) -> None:
        changed = {id(t) for t, version in zip(self.backward_graph.guarded_held, versions) if t._version != version}
        held = (*self.module.named_parameters(), *self.module.named_buffers())
        names = [name for name, t in held if id(t) in changed]
        raise RuntimeError(
            f"{self.label}: {names} of its module were written to in place between the call and its backward, which "
            "reads them; change them behind the backward."
        )

    def _refuse_kept(self) -> None:
        raise RuntimeError(
            f"{self.label}: weights of its module were written to behind the call, and quantized anew by another call "
            "with is_first_microbatch=True, before its backward, which reads the quantized ones; change weights behind "
            "the backward."
        )

    def _refuse_spoilt(self, what: str, by: str) -> None:
        raise RuntimeError(
            f"{self.label}: {what} of a call whose memory {by} wrote over, which was called out of the order of the "
            "captures. What is captured together, or into one pool, shares memory: call it in that order ('_order', or "
            "that of 'modules'), or capture it apart."
        )
