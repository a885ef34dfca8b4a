"""Steps: the layer that the present forward runs, and the layer that a backward reaches.

- schedule.py decides when layers are offloaded and reloaded.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch.cpu_offload.arguments import check_bytes, check_flags, is_int
from transformer_engine.pytorch.cpu_offload.layer import Engines, OffloadableLayerState, PinnedMemoryError
from transformer_engine.pytorch.saved import is_recorded, unpack


class Step:
    """One forward through the layers, with a state of its own for each; several steps may wait for their backward."""

    def __init__(self, layers: list[OffloadableLayerState]) -> None:
        self.layers = layers
        self.layer_index = -1  # of the layer that the forward runs
        self.deferred: int | None = None  # a complete layer, whose offload starts with the next one
        self.last_output: weakref.ref | None = None  # of the latest complete layer: an object that lives in its graph
        self.last_node = (0, 0)  # the node of that output
        self.backward_started = False
        self.thread = threading.get_ident()

    @property
    def abandoned(self) -> bool:
        """The graph of the latest layer is gone, so the next layer does not continue this step."""
        return self.last_output is not None and self.last_output() is None


class LayerNumber(int):
    """The number of a layer, with its step."""

    step: Step


class SharedByCopies:
    """A base class: copies of a model share the object, since streams and host memory cannot be copied."""

    def __copy__(self) -> SharedByCopies:
        return self

    def __deepcopy__(self, memo: dict) -> SharedByCopies:
        return self

    def __reduce__(self) -> tuple:
        raise TypeError(
            f"{type(self).__name__}: streams and host memory cannot be pickled; do not save it, and call "
            "get_cpu_offload_context() after loading."
        )


class Synchronizer(SharedByCopies):
    """The base of both schedules: steps, the present layer, and push and pop of tensors."""

    def __init__(
        self,
        num_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.cuda.Stream | None = None,
        **engine_options: object,
    ) -> None:
        if not is_int(num_layers) or num_layers < 1:
            raise ValueError(f"{type(self).__name__}: argument 'num_layers' is {num_layers!r}, wanted an int >= 1.")
        check_flags(type(self).__name__, retain_pinned_cpu_buffers=retain_pinned_cpu_buffers)
        self.num_layers = self.num_offloaded_layers = num_layers
        self.enabled = True  # False: all calls do nothing
        self.callback_task = -1  # the graph task at whose end finish_part_of_bwd() runs
        self.paused = False  # by context.disable()
        self.retain = retain_pinned_cpu_buffers
        self.engines = Engines(offload_stream, **engine_options)
        self.layer_open = False
        self.number: LayerNumber | None = None  # of the latest layer
        self.current_layer_id: int | None = None  # the latest one in a forward or a backward
        self._step: Step | None = None
        self._steps: list[weakref.ref[Step]] = []
        self._retained: list[list[OffloadableLayerState]] = [[] for _ in range(num_layers)]  # used only with retain
        self._warned = self._warned_of_order = False

    def __deepcopy__(self, memo: dict) -> Synchronizer:
        """Returns itself: a copied model shares it with its context and sync function."""
        return self

    # ---- forward ----

    def is_recording(self) -> bool:
        """Whether saved tensors are kept for a backward here, so that they can be offloaded."""
        return not self.paused and is_recorded()

    def enter_layer(self) -> None:
        """Continues the present layer, or begins the next one."""
        self._drop_finished_step()
        if not self.layer_open:
            self.fwd_step()

    def fwd_step(self) -> LayerNumber:
        """Begins the next layer, and ends the present one if it is open. A new step begins if num_layers have run, the
        backward has started, the graph is gone, or forget_step() was called."""
        self._drop_finished_step()
        if self.layer_open:
            self.end_layer()
        step = self._step
        if step is None or step.layer_index + 1 >= self.num_layers:
            step = None
            self.forget_step()  # so that its layers can be reused if no graph refers to them
            step = self._step = Step([self._new_layer(i) for i in range(self.num_layers)])
            self._steps = [ref for ref in self._steps if ref() is not None] + [weakref.ref(step)]
        step.layer_index += 1
        self.layer_open = True
        self.current_layer_id = step.layer_index
        self.number = LayerNumber(step.layer_index)
        self.number.step = step
        self._on_begin(step, step.layer_index)
        return self.number

    def end_layer(self, output: object = None, node: tuple[int, int] = (0, 0)) -> None:
        """Ends the present layer. output: an object that lives as long as `node`, its last autograd node."""
        if not self.layer_open:
            return
        self.layer_open = False
        self._step.last_output, self._step.last_node = None if output is None else weakref.ref(output), node
        self._on_end(self._step, self._step.layer_index)

    def forget_step(self) -> None:
        """Abandons the present forward: the next layer is the first one again. Tensors saved so far live as long as
        their graph."""
        self._step, self.number, self.layer_open, self.current_layer_id = None, None, False, None

    def offloads_layer(self, layer_num: int) -> bool:
        """Whether the schedule can offload this layer."""
        return True

    def current_layer(self, call: str = "push_tensor") -> OffloadableLayerState:
        if not self.layer_open:
            raise RuntimeError(f"{call}: no layer is open; call it after fwd_step(), and before the end of the layer.")
        return self._step.layers[self._step.layer_index]

    def check_result(self, tensor: torch.Tensor) -> None:
        """Warns once if a layer does not depend on the previous one, whose graph exists: layers are numbered in the
        order in which they run, so it may belong to another forward, or to the next stage of a pipeline. In a capture
        inputs depend on nothing."""
        step = self._step
        if step.last_output is None or step.last_output() is None or stream_captures() or is_graph_capturing():
            return
        if _C.offload_follows(tensor, *step.last_node):
            return
        if not self._warned_of_order:
            self._warned_of_order = True
            warnings.warn(
                f"sync_fn: the result of layer {step.layer_index} does not depend on the result of sync_fn for the "
                "previous layer. If a forward was abandoned before its last layer, or two forwards alternate, layers "
                "are offloaded at wrong times: call context.offload_synchronizer.forget_step() before a forward "
                "starts.",
                RuntimeWarning,
                stacklevel=3,
            )

    def push_tensor(self, tensor: torch.Tensor) -> object:
        """Returns an object that represents a tensor which the present layer saves."""
        return self.current_layer().push_tensor(tensor)

    def pop_tensor(self, saved: object) -> torch.Tensor:
        """The tensor; it is reloaded now if no call has reloaded it yet."""
        return unpack(saved)

    # ---- backward ----

    def bwd_step(self, layer_num: int) -> None:
        """The backward reaches a layer: the reloaded memory of later layers is released, and a reload may start."""
        step = getattr(layer_num, "step", None) or self._newest_step("bwd_step")
        number = self._check_layer_number("bwd_step", layer_num)
        step.backward_started = True
        self.current_layer_id = number
        for layer in step.layers[number + 1 : self.num_offloaded_layers]:
            layer.finish_backward()
        self._on_backward(step, number)

    def finish_part_of_bwd(self) -> None:
        """At the end of a backward, or of the part that one call runs: releases the reloaded memory of layers that it
        read. In a capture the current stream waits for the copies."""
        for step in self.steps():
            for layer in step.layers[: self.num_offloaded_layers]:
                if layer.state == "reload_started" and layer.unpacked:
                    layer.finish_backward()
                elif layer.state == "reload_started" and stream_captures():
                    layer.wait_reload()

    # ---- inquiries ----

    def steps(self) -> Iterator[Step]:
        """Oldest first."""
        return iter([step for ref in self._steps if (step := ref()) is not None])

    @property
    def num_of_fwds(self) -> int | None:
        """The number of the latest layer of the present forward; None before the first one."""
        return None if self.number is None else int(self.number)

    @property
    def layer_states(self) -> dict[int, OffloadableLayerState]:
        """The layers of the newest step by number; empty layers if there is no step."""
        newest = list(self.steps())[-1:]
        layers = newest[0].layers if newest else [self._empty_layer() for _ in range(self.num_layers)]
        return dict(enumerate(layers))

    def get_offloaded_total_size_mb(self) -> float:
        """MiB that the newest step offloaded."""
        newest = list(self.steps())[-1:]
        return sum(layer.get_offloaded_total_size_mb() for step in newest for layer in step.layers)

    def pinned_usage(self) -> dict[str, int]:
        """Bytes of pinned memory: reserved, used, the peak of used, owned by captured graphs; and the number of
        slots."""
        total = dict.fromkeys(("reserved", "used", "peak", "captured", "slots"), 0)
        for _, engine in self.engines:
            for name, value in engine.usage().items():
                total[name] += value
        return total

    def copy_streams(self, device: torch.device) -> tuple[torch.cuda.ExternalStream | None, ...]:
        """The streams of the copies to the host and back, to record events on; None on a CPU."""
        if device.type != "cuda":
            return None, None
        return tuple(torch.cuda.ExternalStream(s, device) for s in self.engines.of(device).streams())

    def reserve_pinned(self, nbytes: int, device: torch.device | str | int = "cuda") -> None:
        """Reserves pinned memory for `nbytes` in one block, which a capture needs before it starts."""
        where = torch.device(device)
        check_bytes("reserve_pinned", nbytes, where)
        if self.enabled:
            self.engines.of(where).reserve(nbytes)

    def release_pinned(self, *, graphs_are_gone: bool = False) -> None:
        """Frees unused pinned memory; with graphs_are_gone also that of captured graphs, which the caller has reset.
        Otherwise their memory outlives even this object, since a replay copies there."""
        for _, engine in self.engines:
            if graphs_are_gone:
                engine.release_captured()
            engine.trim()

    @property
    def debug(self) -> bool:
        """Fills released host memory with 0xFF, a NaN in each float dtype, so that a late read shows. Set it before the
        first offload; on a GPU the host then waits for copies."""
        return bool(self.engines.options.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        check_flags(type(self).__name__, debug=value)
        if list(self.engines):
            raise RuntimeError(
                f"{type(self).__name__}: 'debug' was set after tensors were offloaded; set it before the first step."
            )
        self.engines.options["debug"] = bool(value)

    # ---- inside ----

    def _drop_finished_step(self) -> None:
        step = self._step
        if step is None:
            return
        if step.backward_started or step.abandoned or (not self.layer_open and step.layer_index + 1 >= self.num_layers):
            self.forget_step()
        elif step.thread != threading.get_ident():
            raise RuntimeError(
                f"fwd_step: a forward is running in thread {step.thread}, but a layer of thread "
                f"{threading.get_ident()} begins. Use one context for each thread, or call forget_step() after a "
                "forward that was abandoned."
            )

    def _on_begin(self, step: Step, number: int) -> None: ...

    def _on_end(self, step: Step, number: int) -> None: ...

    def _on_backward(self, step: Step, number: int) -> None: ...

    def _new_layer(self, number: int) -> OffloadableLayerState:
        in_steps = {id(layer) for step in self.steps() for layer in step.layers}
        for layer in self._retained[number]:
            if id(layer) not in in_steps and not layer.in_use:
                layer.release_all_memory()
                return layer
        layer = self._empty_layer()
        if self.retain:
            self._retained[number].append(layer)
        return layer

    def _empty_layer(self) -> OffloadableLayerState:
        return OffloadableLayerState(None, self.retain, engines=self.engines)

    def _newest_step(self, call: str) -> Step:
        for step in reversed(list(self.steps())):
            return step
        raise RuntimeError(f"{call}: no forward has run; call fwd_step() first.")

    def _check_layer_number(self, call: str, layer_num: int) -> int:
        if not is_int(layer_num) or not 0 <= layer_num < self.num_layers:
            raise ValueError(
                f"{call}: argument 'layer_id' is {layer_num!r}, wanted a layer's number, 0 to {self.num_layers - 1}."
            )
        return int(layer_num)

    def _start_offload(self, layer: OffloadableLayerState) -> None:
        """If pinned memory is exhausted, the layer stays on the device, with one warning."""
        try:
            layer.start_offload()
        except PinnedMemoryError as error:
            if stream_captures():
                raise
            layer.no_pinned_memory = True
            if not self._warned:
                self._warned = True
                warnings.warn(f"CPU offload: a layer stays on the device. {error}", RuntimeWarning, stacklevel=4)
