"""The schedules of offload and reload: the default one, and one that the caller controls layer by layer.

- Nothing is copied here.
"""

from __future__ import annotations

import torch

from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch.cpu_offload.arguments import is_int
from transformer_engine.pytorch.cpu_offload.layer import OffloadableLayerState
from transformer_engine.pytorch.cpu_offload.steps import Step, Synchronizer


class DefaultOffloadSynchronizer(Synchronizer):
    """Offloads the first k of n layers. The offload of layer i starts when the layer is complete, and its device memory
    is released before layer n-k+i runs; its reload starts when the backward reaches layer n-1-k+i. At most n-k layers
    are on the device.

    In a capture the offload of layer i starts with layer i+1, since a graph has to join the copies that it forks: they
    are in the graph of that layer, or in the one graph of both.
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
        if not is_int(num_offloaded_layers) or not 0 <= num_offloaded_layers < num_layers:
            raise ValueError(
                f"DefaultOffloadSynchronizer: argument 'num_offloaded_layers' is {num_offloaded_layers!r} of "
                f"{num_layers} layers, wanted at least 0 and fewer than all: the backward reads the last layer as "
                "soon as it is complete. Offload fewer, or use manual synchronization."
            )
        self.num_offloaded_layers = num_offloaded_layers
        self._num_on_device = num_layers - num_offloaded_layers

    def offloads_layer(self, layer_num: int) -> bool:
        return layer_num < self.num_offloaded_layers

    def _on_begin(self, step: Step, number: int) -> None:
        if step.deferred is not None:
            self._start_offload(step.layers[step.deferred])
            step.deferred = None
        released = number - self._num_on_device
        if released >= 0 and step.layers[released].state == "offload_started":
            step.layers[released].release_activation_forward_gpu_memory()

    def _on_end(self, step: Step, number: int) -> None:
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
            self._start_offload(step.layers[number])

    def _on_backward(self, step: Step, number: int) -> None:
        returning = number - (self._num_on_device - 1)
        if 0 <= returning < self.num_offloaded_layers and step.layers[returning].state == "offload_finished":
            step.layers[returning].start_reload()


class ManualOffloadSynchronizer(Synchronizer):
    """The caller offloads and reloads layers by their numbers.

    - If several forwards wait for their backward, an offload is that of the newest one, and a release or reload is that
      of the oldest one whose layer is in the required state.
    - Where the context does nothing, for example in an evaluation, nothing is offloaded or released.
    """

    def start_offload_layer(self, layer_id: int) -> None:
        """Starts the offload of a complete layer."""
        layer = self._select_layer("start_offload_layer", layer_id, "not_offloaded")
        if layer is not None:
            self._start_offload(layer)

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Releases the layer's device memory, after the copies to the host, in the order of the current stream."""
        layer = self._select_layer("release_activation_forward_gpu_memory", layer_id, "offload_started")
        if layer is not None:
            layer.release_activation_forward_gpu_memory()

    def start_reload_layer(self, layer_id: int) -> None:
        """Starts the reload of a layer. Without this call it is reloaded when its backward reads it."""
        layer = self._select_layer("start_reload_layer", layer_id, "offload_finished")
        if layer is not None:
            layer.start_reload()

    def _select_layer(self, call: str, layer_id: int, state: str) -> OffloadableLayerState | None:
        """The layer that a call applies to. None if there is nothing to do: the context does nothing here, or nothing
        of this layer was offloaded."""
        number, reload = self._check_layer_number(call, layer_id), state == "offload_finished"
        if not (reload or self.is_recording()):
            return None
        newest = self._newest_step(call)
        layers = [step.layers[number] for step in self.steps()]
        if state == "not_offloaded":  # the present forward offloads
            if number > newest.layer_index and layers[-1].state == state:
                raise RuntimeError(
                    f"{call}: layer {number} has not run, the forward is in layer {newest.layer_index}; call it after "
                    "sync_fn of that layer."
                )
            return layers[-1]
        found = next((layer for layer in layers if layer.state == state), layers[-1])
        if found.state == state and found.empty:
            found = next((layer for layer in layers if layer.state == state and not layer.empty), found)
        stays = found.no_pinned_memory and found.state == "not_offloaded"
        return None if stays or (reload and found.state == state and found.empty) else found
