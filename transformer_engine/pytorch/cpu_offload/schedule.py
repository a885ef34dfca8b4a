"""When layers leave and come back: by the default schedule, or as the caller says layer by layer. It copies nothing."""

from __future__ import annotations

import torch

from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch.cpu_offload.arguments import is_count
from transformer_engine.pytorch.cpu_offload.layer import OffloadableLayerState
from transformer_engine.pytorch.cpu_offload.steps import Step, Synchronizer


class DefaultOffloadSynchronizer(Synchronizer):
    """The first k of n layers leave. Layer i starts to when it is complete, has left before layer n-k+i runs, and
    starts to come back when the backward reaches layer n-1-k+i: at most n-k layers are on the device.

    In a capture layer i leaves at the start of layer i+1, for what a graph forks it must join: the copy rides in that
    layer's graph, or in the one graph of both.
    """

    def __init__(
        self,
        num_layers: int,
        num_offloaded_layers: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: torch.cuda.Stream | None = None,
        **engine_options: object,
    ) -> None:
        super().__init__(num_layers, retain_pinned_cpu_buffers, offload_stream, **engine_options)
        if not is_count(num_offloaded_layers) or not 0 <= num_offloaded_layers < num_layers:
            raise ValueError(
                f"DefaultOffloadSynchronizer: {num_offloaded_layers!r} of {num_layers} layers are to be offloaded, "
                "wanted at least 0 and fewer than all: the last layer is wanted again as soon as it is complete. "
                "Offload fewer, or say when by manual synchronization."
            )
        self.num_offloaded_layers = num_offloaded_layers
        self._kept = num_layers - num_offloaded_layers

    def wants_tensors(self, layer_num: int) -> bool:
        return layer_num < self.num_offloaded_layers

    def _begin(self, step: Step, number: int) -> None:
        if step.deferred is not None:
            self._start(step.layers[step.deferred])
            step.deferred = None
        leaving = number - self._kept
        if leaving >= 0 and step.layers[leaving].state == "offload_started":
            step.layers[leaving].release_activation_forward_gpu_memory()

    def _end(self, step: Step, number: int) -> None:
        in_capture = stream_captures()
        if in_capture:
            for layer in step.layers:
                if layer.state == "offload_started":
                    layer.join()
        if number >= self.num_offloaded_layers:
            return
        if in_capture:
            step.deferred = number
        else:
            self._start(step.layers[number])

    def _reach(self, step: Step, number: int) -> None:
        returning = number - (self._kept - 1)
        if 0 <= returning < self.num_offloaded_layers and step.layers[returning].state == "offload_finished":
            step.layers[returning].start_reload()


class ManualOffloadSynchronizer(Synchronizer):
    """Layers leave and come back as the caller says, by their numbers. Where several forwards wait for their backward,
    the newest one's leaves, and the oldest one's whose layer has left is released or comes back. Where the context
    does nothing, as in an evaluation, nothing leaves or is released."""

    def start_offload_layer(self, layer_id: int) -> None:
        """The layer is complete and starts to leave."""
        layer = self._layer("start_offload_layer", layer_id, "not_offloaded")
        if layer is not None:
            self._start(layer)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Behind the copy out, in the current stream, the layer's device memory is given up."""
        layer = self._layer("release_activation_forward_gpu_memory", layer_id, "offload_started")
        if layer is not None:
            layer.release_activation_forward_gpu_memory()

    def start_reload_layer(self, layer_id: int) -> None:
        """The layer starts to come back. One that nobody brings back is brought back when its backward reads it."""
        layer = self._layer("start_reload_layer", layer_id, "offload_finished")
        if layer is not None:
            layer.start_reload()

    def _layer(self, call: str, layer_id: int, state: str) -> OffloadableLayerState | None:
        """None: nothing is to be done, since nothing leaves here, or nothing of this layer has left."""
        number, reload = self._checked(call, layer_id), state == "offload_finished"
        if not (reload or self.records()):
            return None
        newest = self._newest(call)
        layers = [step.layers[number] for step in self.steps()]
        if state == "not_offloaded":  # it is the forward under way that offloads
            if number > newest.reached and layers[-1].state == state:
                raise RuntimeError(
                    f"{call}: layer {number} has not run, the forward is in layer {newest.reached}; call it behind "
                    "sync_fn of that layer."
                )
            return layers[-1]
        found = next((layer for layer in layers if layer.state == state), layers[-1])
        if found.state == state and found.empty:
            found = next((layer for layer in layers if layer.state == state and not layer.empty), found)
        stayed = found.stayed and found.state == "not_offloaded"
        return None if stayed or (reload and found.state == state and found.empty) else found
