"""Checks of a call of a captured callable, and of its backward, apart from the arguments (signature.py).

- A check raises before anything is copied or changed.
- Nothing is replayed here.
"""

import inspect
import warnings

from transformer_engine.pytorch.graph.describe import short_repr
from transformer_engine.pytorch.graph.memory.buffers import version_of
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.graph.replay.record import CaptureRecord
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class ReplayChecks:
    """Mode, recipe, stream, event, grad mode, versions and overwritten memory. Methods named refuse_* always raise."""

    __slots__ = ("label", "record")

    def __init__(self, record: CaptureRecord) -> None:
        self.record, self.label = record, record.label

    def refuse_capturing(self) -> None:
        if getattr(self.record.eager, "running", False):
            raise RuntimeError(
                f"{self.label}: called by the __call__ of its module's class while that runs without the graph; let "
                "__call__ choose by is_graph_capturing() first what is captured."
            )
        raise RuntimeError(
            f"{self.label}: called inside another capture, or its warm-up, but a graph cannot be part of another one; "
            "reset() it first and capture everything at once."
        )

    def check_peers(self) -> None:
        """CommTimeout if a peer channel has failed: a replay would produce NaN."""
        for channel in self.record.peer_channels:
            channel.refuse_failed()

    def check_recipe(self) -> None:
        """The autocast around a replay has to have the recipe of the capture."""
        plan, captured = current_state().chosen_plan(), self.record.recipe_plan
        if plan is not captured and plan.recipe != captured.recipe:
            raise RuntimeError(
                f"{self.label}: called in an autocast with another recipe ({plan.recipe}) than it was captured with "
                f"({captured.recipe}), which is part of the graph; call it under that recipe (its functions have to be "
                "the same objects), or capture again."
            )

    def warn_of_autocast(self) -> None:
        """Once: an autocast around the replay of a graph that was captured without one."""
        self.record.calls.warned_autocast = True
        if any(part._products for part in our_modules(self.record.module)):
            warnings.warn(
                f"{self.label}: called in te.autocast, but captured without it: it runs as captured, not in FP8. "
                "Capture it with enabled=True and that recipe, or call it outside of the autocast.",
                UserWarning,
                stacklevel=3,
            )

    def refuse_recomputation(self) -> None:
        raise RuntimeError(
            f"{self.label}: called inside of a checkpoint, but graphs that were captured with it copy saved tensors to "
            "the host and back, which is correct only in the order of the captures, and a recomputation runs out of "
            "that order; put the checkpoint inside of the captured callable, or capture without CPU offload."
        )

    def refuse_forward_id(self, forward_id: int) -> None:
        """For a backward of a call whose static tensors were overwritten by another call, or released."""
        if forward_id == self.record.calls.forward_id:
            raise RuntimeError(
                f"{self.label}: backward of a call whose tensors are gone: its backward ran already. Run it once; "
                "retain_graph_in_backward=True captures one that can run again."
            )
        raise RuntimeError(
            f"{self.label}: backward of a call whose tensors are gone: another call came after it. Run the backward "
            "between this call and the next one; '_order' captures several microbatches. The recomputation of "
            "torch.utils.checkpoint(use_reentrant=False) is such a call: use te.checkpoint or use_reentrant=True, or "
            "capture the checkpoint with its contents."
        )

    def run_eager(self, args: tuple, kwargs: dict, is_first_microbatch: bool | None) -> object:
        """Runs the module without its graph, in the mode (train or eval) that was not captured."""
        record, modes = self.record, {True: "train", False: "eval"}
        record.calls.mode_mismatches += 1
        warnings.warn(
            f"{self.label}: captured in {modes[record.training]} mode, called in {modes[not record.training]} mode: "
            f"runs without the graph, {record.calls.mode_mismatches} times so far.",
            stacklevel=3,
        )
        if is_first_microbatch is not None and "is_first_microbatch" in inspect.signature(record.eager).parameters:
            kwargs = {**kwargs, "is_first_microbatch": is_first_microbatch}
        record.calls.ran_eager = True
        return record.eager(*args, **kwargs)

    def check_stream(self, stream: object | None, event: object | None) -> None:
        backend = self.record.backend
        if stream is not None and not backend.is_stream(stream):
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_stream' is {short_repr(stream)}, wanted a torch.cuda.Stream of "
                "the device of the capture."
            )
        if event is None:
            return
        if not backend.is_event(event):
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' is {short_repr(event)}, wanted the torch.cuda.Event("
                "external=True) that the captured region records."
            )
        if stream is None or stream == backend.current_stream():
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' was given without another stream for the graph, so there "
                "is nothing to wait for; pass a stream as 'cuda_graph_stream', or leave the event out."
            )
        if backend.handle_of(event) not in self.record.forward_graph.events:
            raise ValueError(
                f"{self.label}: argument 'cuda_graph_event' is an event that the captured forward does not record, or "
                "before its results, so that these would be read too early; record it after them, a torch.cuda.Event("
                "external=True), or leave it out to wait for the whole graph."
            )

    def check_frozen(self) -> None:
        unfrozen = [list(p.shape) for p in self.record.frozen if p.requires_grad]
        if unfrozen:
            raise RuntimeError(
                f"{self.label}: parameters of shapes {unfrozen} require a gradient now, but did not when it was "
                "captured, so its backward computes none for them; freeze them again, or capture again."
            )

    def check_no_grad(self) -> None:
        """If no backward was captured: a call must not need one."""
        self.check_frozen()
        record = self.record
        if not record.captured_no_grad:
            return
        requiring = [record.signature.names[record.signature.tensor_indices[i]] for i in record.inputs_requiring_grad]
        requiring += [f"a parameter of shape {list(p.shape)}" for p in record.parameters if p.requires_grad]
        if requiring:
            raise RuntimeError(
                f"{self.label}: captured under torch.no_grad(), so without a backward, but called with gradients "
                f"enabled, and {requiring[0]} requires one. Call it under torch.no_grad(), or capture it with "
                "gradients."
            )

    def check_versions(self, versions: list[tuple[int, int]]) -> None:
        """versions: from GraphRunner.guarded_versions at the call."""
        forward, signature = self.record.forward_graph, self.record.signature
        for i, version in versions:
            if version_of(forward.outputs[i] if i >= 0 else forward.inputs[~i]) != version:
                name = f"result {i}" if i >= 0 else signature.names[signature.tensor_indices[~i]]
                raise RuntimeError(
                    f"{self.label}: {name} was written to in place between the call and its backward, which reads it, "
                    "or would not include the write (it shares memory with an argument, a parameter or another "
                    "result); write to a copy."
                )

    def refuse_module_versions(self, versions: list[int]) -> None:
        record = self.record
        guarded = record.backward_graph.guarded_module_tensors
        changed = {id(t) for t, version in zip(guarded, versions) if t._version != version}
        tensors = (*record.module.named_parameters(), *record.module.named_buffers())
        names = [name for name, t in tensors if id(t) in changed]
        raise RuntimeError(
            f"{self.label}: {names} of its module were written to in place between the call and its backward, which "
            "reads them; change them after the backward."
        )

    def refuse_requantized(self) -> None:
        raise RuntimeError(
            f"{self.label}: weights of its module were written to after the call, and quantized again by another call "
            "with is_first_microbatch=True, before its backward, which reads the quantized ones; change weights after "
            "the backward."
        )

    def refuse_overwritten(self, what: str, by: str) -> None:
        raise RuntimeError(
            f"{self.label}: {what} of a call whose memory {by} overwrote, which was called out of the order of the "
            "captures. Callables that are captured together, or into one pool, share memory: call them in that order "
            "('_order', or that of 'modules'), or capture them apart."
        )
