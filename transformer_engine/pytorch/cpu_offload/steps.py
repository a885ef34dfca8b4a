"""Steps: which layer of which forward is at work, and which backward reaches it. When layers leave and come back is the
schedule's (schedule.py)."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch.cpu_offload.arguments import check_bytes, check_flags, is_count
from transformer_engine.pytorch.cpu_offload.layer import Engines, OffloadableLayerState, PinnedMemoryError
from transformer_engine.pytorch.saved import is_recorded, unpack


class Step:
    """One forward through the layers, with its own state for each of them: several may wait for their backward."""

    def __init__(self, layers: list[OffloadableLayerState]) -> None:
        self.layers = layers
        self.reached = -1  # the layer that the forward is in
        self.deferred: int | None = None  # a layer that is complete, and leaves with the next one
        self.last_output: weakref.ref | None = None  # of the last layer that was ended, as the graph holds it
        self.last_node = (0, 0)  # that the graph has there
        self.over = False  # its backward has begun
        self.thread = threading.get_ident()

    @property
    def abandoned(self) -> bool:
        """The graph of the last layer is gone, so what comes next is no continuation of it."""
        return self.last_output is not None and self.last_output() is None


class LayerNumber(int):
    """A layer's number, which remembers the step that it belongs to."""

    step: Step


class Shared:
    """A copy of a model has the same one, as it has the same sync function: its streams and host memory are no data."""

    def __copy__(self) -> Shared:
        return self

    def __deepcopy__(self, memo: dict) -> Shared:
        return self

    def __reduce__(self) -> tuple:
        raise TypeError(
            f"{type(self).__name__}: streams and host memory cannot be pickled; leave it out of what is saved, and "
            "call get_cpu_offload_context() where it is loaded."
        )


class Synchronizer(Shared):
    """What the two schedules share: steps, the layer at work, the way in and out for tensors."""

    def __init__(
        self,
        num_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.cuda.Stream | None = None,
        **engine_options: object,
    ) -> None:
        if not is_count(num_layers) or num_layers < 1:
            raise ValueError(f"{type(self).__name__}: argument 'num_layers' is {num_layers!r}, wanted an int >= 1.")
        check_flags(type(self).__name__, retain_pinned_cpu_buffers=retain_pinned_cpu_buffers)
        self.num_layers = self.num_offloaded_layers = num_layers
        self.enabled = True  # no: it is there so that its calls are, and does nothing
        self.queued_in = -1  # the backward at whose end finish_part_of_bwd() runs
        self.paused = False  # by context.disable()
        self.retain = retain_pinned_cpu_buffers
        self.engines = Engines(offload_stream, **engine_options)
        self.layer_open = False
        self.number: LayerNumber | None = None  # of the layer that was begun last
        self.current_layer_id: int | None = None  # of the layer that a forward or a backward reached last
        self._step: Step | None = None
        self._steps: list[weakref.ref[Step]] = []
        self._own: list[list[OffloadableLayerState]] = [[] for _ in range(num_layers)]  # with retain alone
        self._warned = self._warned_of_order = False

    def __deepcopy__(self, memo: dict) -> Synchronizer:
        """Itself, like the context and the sync function that call it: a copied model shares all three."""
        return self

    # ---- forward ----

    def records(self) -> bool:
        """Whether what runs here is recorded for a backward, so that it may leave."""
        return not self.paused and is_recorded()

    def enter_layer(self) -> None:
        """The layer at work goes on, or the next one begins."""
        self._forget_ended()
        if not self.layer_open:
            self.fwd_step()

    def fwd_step(self) -> LayerNumber:
        """The next layer begins, in a new step behind the last one; the one before it is ended, if it was not. A step
        is over when num_layers ran, its backward has begun or its graph is gone, and when forget_step() says so."""
        self._forget_ended()
        if self.layer_open:
            self.end_layer()
        step = self._step
        if step is None or step.reached + 1 >= self.num_layers:
            step = None
            self.forget_step()  # so that its layers may serve again, where no graph wants them
            step = self._step = Step([self._new_layer(i) for i in range(self.num_layers)])
            self._steps = [ref for ref in self._steps if ref() is not None] + [weakref.ref(step)]
        step.reached += 1
        self.layer_open = True
        self.current_layer_id = step.reached
        self.number = LayerNumber(step.reached)
        self.number.step = step
        self._begin(step, step.reached)
        return self.number

    def end_layer(self, output: object = None, node: tuple[int, int] = (0, 0)) -> None:
        """The layer at work is complete. `output`: something that lives as long as `node`, its end in the graph."""
        if not self.layer_open:
            return
        self.layer_open = False
        self._step.last_output, self._step.last_node = None if output is None else weakref.ref(output), node
        self._end(self._step, self._step.reached)

    def forget_step(self) -> None:
        """The forward under way will not be continued: the next layer is the first one again. What was saved so far
        lives as long as its graph."""
        self._step, self.number, self.layer_open, self.current_layer_id = None, None, False, None

    def wants_tensors(self, layer_num: int) -> bool:
        """Whether anything of this layer can leave."""
        return True

    def current_layer(self, call: str = "push_tensor") -> OffloadableLayerState:
        if not self.layer_open:
            raise RuntimeError(f"{call}: no layer is at work: call it before the layer's end, and behind fwd_step().")
        return self._step.layers[self._step.reached]

    def check_result(self, tensor: torch.Tensor) -> None:
        """Layers are numbered as they run. One that reads nothing of the layer before it, whose graph is there, may
        belong to another forward, or to a pipeline's next stage; in a capture inputs come from nowhere."""
        step = self._step
        if step.last_output is None or step.last_output() is None or stream_captures() or is_graph_capturing():
            return
        if _C.offload_follows(tensor, *step.last_node):
            return
        if not self._warned_of_order:
            self._warned_of_order = True
            warnings.warn(
                f"sync_fn: the result of layer {step.reached} does not come from what sync_fn returned for the layer "
                "before it. If a forward was left before its last layer, or two take turns, layers leave at other "
                "times than meant: call context.offload_synchronizer.forget_step() before a forward begins anew.",
                RuntimeWarning,
                stacklevel=3,
            )

    def push_tensor(self, tensor: torch.Tensor) -> object:
        """What stands for a tensor that the layer at work saves."""
        return self.current_layer().push_tensor(tensor)

    def pop_tensor(self, saved: object) -> torch.Tensor:
        """The tensor again; one that nobody has brought back yet is brought back now."""
        return unpack(saved)

    # ---- backward ----

    def bwd_step(self, layer_num: int) -> None:
        """The backward reaches a layer: those behind it are done with, and others may come back."""
        step = getattr(layer_num, "step", None) or self._newest("bwd_step")
        number = self._checked("bwd_step", layer_num)
        step.over = True
        self.current_layer_id = number
        for layer in step.layers[number + 1 : self.num_offloaded_layers]:
            layer.finish_backward()
        self._reach(step, number)

    def finish_part_of_bwd(self) -> None:
        """A backward, or the part of it that one call runs, is over: device memory that came back for layers that it
        went through is given up. In a capture the copies that are under way are waited for."""
        for step in self.steps():
            for layer in step.layers[: self.num_offloaded_layers]:
                if layer.state == "reload_started" and layer.popped:
                    layer.finish_backward()
                elif layer.state == "reload_started" and stream_captures():
                    layer.wait_reload()

    # ---- inquiries ----

    def steps(self) -> Iterator[Step]:
        """Oldest first."""
        return iter([step for ref in self._steps if (step := ref()) is not None])

    @property
    def num_of_fwds(self) -> int | None:
        """The number of the layer that the forward under way began last; None before the first one."""
        return None if self.number is None else int(self.number)

    @property
    def layer_states(self) -> dict[int, OffloadableLayerState]:
        """The newest step's layers by their numbers: each step has its own. Where there is none, layers that hold
        nothing."""
        newest = list(self.steps())[-1:]
        layers = newest[0].layers if newest else [self._empty_layer() for _ in range(self.num_layers)]
        return dict(enumerate(layers))

    def get_offloaded_total_size_mb(self) -> float:
        """MiB that left in the newest step."""
        newest = list(self.steps())[-1:]
        return sum(layer.get_offloaded_total_size_mb() for step in newest for layer in step.layers)

    def pinned_usage(self) -> dict[str, int]:
        """Bytes of pinned memory: reserved, used, the peak of used, those that captured graphs own; and slots."""
        total = dict.fromkeys(("reserved", "used", "peak", "captured", "slots"), 0)
        for _, engine in self.engines:
            for name, value in engine.usage().items():
                total[name] += value
        return total

    def copy_streams(self, device: torch.device) -> tuple[torch.cuda.ExternalStream | None, ...]:
        """The streams of the copies out and back on `device`, to record events on; on a CPU there are none."""
        if device.type != "cuda":
            return None, None
        return tuple(torch.cuda.ExternalStream(s, device) for s in self.engines.of(device).streams())

    def reserve_pinned(self, nbytes: int, device: torch.device | str | int = "cuda") -> None:
        """Pinned memory for `nbytes` in one piece exists afterwards, as a capture needs it to."""
        where = torch.device(device)
        check_bytes("reserve_pinned", nbytes, where)
        if self.enabled:
            self.engines.of(where).reserve(nbytes)

    def release_pinned(self, *, graphs_are_gone: bool = False) -> None:
        """Pinned memory that nothing lies in is given back; with graphs_are_gone that of captured graphs too, which the
        caller has reset. Without, it outlives even this object: a replay copies there."""
        for _, engine in self.engines:
            if graphs_are_gone:
                engine.release_captured()
            engine.trim()

    @property
    def debug(self) -> bool:
        """Host memory that is given up is filled with 0xFF, NaN in each float dtype: what still reads it is seen. To be
        set before the first tensor leaves; on a GPU the host then waits for copies."""
        return bool(self.engines.options.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        check_flags(type(self).__name__, debug=value)
        if list(self.engines):
            raise RuntimeError(
                f"{type(self).__name__}: 'debug' is set when tensors have left already; set it before the first step."
            )
        self.engines.options["debug"] = bool(value)

    # ---- inside ----

    def _forget_ended(self) -> None:
        step = self._step
        if step is None:
            return
        if step.over or step.abandoned or (not self.layer_open and step.reached + 1 >= self.num_layers):
            self.forget_step()
        elif step.thread != threading.get_ident():
            raise RuntimeError(
                f"fwd_step: a forward is under way in thread {step.thread}, and a layer of thread "
                f"{threading.get_ident()} begins. Take a context for each thread, or call forget_step() where that "
                "forward was left."
            )

    def _begin(self, step: Step, number: int) -> None: ...

    def _end(self, step: Step, number: int) -> None: ...

    def _reach(self, step: Step, number: int) -> None: ...

    def _new_layer(self, number: int) -> OffloadableLayerState:
        in_steps = {id(layer) for step in self.steps() for layer in step.layers}
        for layer in self._own[number]:
            if id(layer) not in in_steps and not layer.wanted:
                layer.release_all_memory()
                return layer
        layer = self._empty_layer()
        if self.retain:
            self._own[number].append(layer)
        return layer

    def _empty_layer(self) -> OffloadableLayerState:
        return OffloadableLayerState(None, self.retain, engines=self.engines)

    def _newest(self, call: str) -> Step:
        for step in reversed(list(self.steps())):
            return step
        raise RuntimeError(f"{call}: no forward has been run; call fwd_step() before it.")

    def _checked(self, call: str, layer_num: int) -> int:
        if not is_count(layer_num) or not 0 <= layer_num < self.num_layers:
            raise ValueError(
                f"{call}: argument 'layer_id' is {layer_num!r}, wanted a layer's number, 0 to {self.num_layers - 1}."
            )
        return int(layer_num)

    def _start(self, layer: OffloadableLayerState) -> None:
        """Where pinned memory is exhausted the step goes on without this layer's offload, and says so once."""
        try:
            layer.start_offload()
        except PinnedMemoryError as error:
            if stream_captures():
                raise
            layer.stayed = True
            if not self._warned:
                self._warned = True
                warnings.warn(f"CPU offload: a layer stays on the device. {error}", RuntimeWarning, stacklevel=4)
