"""The saved tensors of one layer, as a StorageHandler: which of them are offloaded, and how they are reloaded.

- The synchronizer (steps.py, schedule.py) decides when.
- The engine (transformer_engine/offload.h) orders streams, events and host memory.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpu_offload.arguments import check_flags, check_stream
from transformer_engine.pytorch.saved import PackedStorage, Saved, StorageHandler, pop_saved
from transformer_engine.pytorch.saved.marks import has_storage

MIN_ELEMENTS = 256 * 1024  # a smaller tensor is offloaded only if it shares a storage with a larger one

PinnedMemoryError = _C.PinnedMemoryError

_offloads_started: Counter[int] = Counter()  # by calling thread: other threads may train during a capture


def offloads_started() -> int:
    """How many layers this thread has started to offload: a capture compares the count before and after it, since
    copies made in a capture are part of its graphs."""
    return _offloads_started[_C.this_thread()]


class Engines:
    """One engine per device, made when the first tensor there is offloaded. options: of _C.OffloadEngine."""

    def __init__(self, stream: torch.cuda.Stream | None = None, **options: object) -> None:
        check_stream("OffloadableLayerState", stream)
        self.options = {"stream": 0 if stream is None else stream.cuda_stream, **options}
        self._stream = stream  # kept alive while the engine copies on it
        self._engines: dict[torch.device, _C.OffloadEngine] = {}

    def of(self, device: torch.device) -> _C.OffloadEngine:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._engines:
            self._engines[device] = _C.OffloadEngine(device, **self.options)
        return self._engines[device]

    def __iter__(self):
        return iter(self._engines.items())


class ReadyMark(NamedTuple):
    """A point at which a storage was complete. As long as the reference is held, no other storage has its address."""

    number: int
    storage: StorageWeakRef
    version: int


class OffloadedStorage(PackedStorage):
    """A storage with saved tensors of one layer, which may be offloaded."""

    __slots__ = ("index", "large_enough", "layer")

    back = "nothing: it is reloaded from the host"

    def __init__(self, layer: OffloadableLayerState, tensor: torch.Tensor) -> None:
        self.index: int | None = None  # among the offloaded storages; set first, since __del__ reads it
        super().__init__(tensor)
        self.layer = layer
        self.large_enough = False  # whether a tensor in it has MIN_ELEMENTS

    @property
    def status(self) -> str:
        return "kept" if self.index is None else "offloaded"

    def add(self, tensor: torch.Tensor) -> None:
        super().add(tensor)
        self.large_enough |= tensor.numel() >= MIN_ELEMENTS

    def fetch(self) -> None:
        """Reloads the layer if no call has reloaded it yet."""
        if self.away and self.layer.state == "offload_finished":
            self.layer.start_reload()

    def back_as(self, saved: Saved) -> torch.Tensor:
        self.layer.unpacked = True
        if not self.away:
            return super().back_as(saved)
        return self.layer._engine_layer.pop(self.index, saved)

    def __del__(self) -> None:
        if self.index is not None:
            self.layer._storage_freed(self.index)


class OffloadableLayerState(StorageHandler):
    """The saved tensors of one layer, from the forward that saves them to the last backward that reads them.

    States: not_offloaded, offload_started, offload_finished, reload_started. A call in a wrong state raises a
    RuntimeError that names both states.
    """

    def __init__(
        self,
        offload_stream: torch.cuda.Stream | None = None,
        retain_pinned_cpu_buffers: bool = False,
        *,
        engines: Engines | None = None,
    ) -> None:
        check_flags("OffloadableLayerState", retain_pinned_cpu_buffers=retain_pinned_cpu_buffers)
        self.engines = Engines(offload_stream) if engines is None else engines
        self.retain = retain_pinned_cpu_buffers
        self._engine_layer: _C.OffloadLayer | None = None
        super().__init__()
        self._ready_marks: dict[int, ReadyMark] = {}  # by storage
        self._num_offloaded = 0  # offloaded storages that are still referenced
        self.unpacked = False  # whether a tensor was read since the reload
        self.bytes = 0  # of the latest offload
        self.no_pinned_memory = False  # the latest offload failed for lack of it

    @property
    def in_use(self) -> bool:
        """Whether a tensor saved here may still be read."""
        return bool(self.taken)

    @property
    def empty(self) -> bool:
        """Whether no offloaded tensor may still be read; true from the start for a frozen layer."""
        return self._num_offloaded == 0

    @property
    def state(self) -> str:
        return "not_offloaded" if self._engine_layer is None else self._engine_layer.state

    def __repr__(self) -> str:
        return f"OffloadableLayerState({self.state}, {len(self.taken)} storages, {self.bytes} bytes offloaded)"

    # ---- forward ----

    def mark_ready(self, tensors: list[torch.Tensor], whole_storage: bool = False) -> None:
        """Declares these tensors complete: their copies need not wait for work after this call. A tensor that is part
        of its storage declares only itself; `whole_storage` declares the whole storage."""
        tensors = [t for t in tensors if has_storage(t) and not t.is_inference()]
        tensors = [
            t for t in tensors if whole_storage or (t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes())
        ]
        tensors = [t for t in tensors if t.is_cuda] or tensors
        if not tensors or self.state != "not_offloaded":
            return
        mark = self._engine_layer_on(tensors[0].device).mark()
        for t in tensors:
            storage = t.untyped_storage()
            self._ready_marks[storage._cdata] = ReadyMark(mark, StorageWeakRef(storage), t._version)

    @property
    def takes(self) -> bool:
        return self.state == "not_offloaded"

    def take(self, tensor: torch.Tensor) -> OffloadedStorage | None:
        """None for a storage in which no tensor can have MIN_ELEMENTS."""
        small = tensor.numel() < MIN_ELEMENTS and tensor.untyped_storage().nbytes() < MIN_ELEMENTS
        return None if small else OffloadedStorage(self, tensor)

    def push_tensor(self, tensor: torch.Tensor) -> object:
        """Returns an object that represents the tensor until pop_tensor(). The tensor stays on the device until
        start_offload()."""
        return self.push(tensor)

    def start_offload(self) -> None:
        """Starts the copies to the host, after the work enqueued on the current stream so far."""
        self._check_state("start_offload", "not_offloaded")
        self.no_pinned_memory = False
        offloaded = [m for m in self.taken if m.large_enough and not m.stays]
        devices = {m.tensor.device for m in offloaded}
        device = min(devices, key=lambda d: (d.type == "cpu", d.index or 0), default=torch.device("cpu"))
        offloaded = [
            m for m in offloaded if m.tensor.device == device
        ]  # host tensors stay if device tensors are offloaded
        for memory in offloaded:
            memory.check()
        engine_layer = self._engine_layer_on(device)
        engine_layer.start([m.tensor for m in offloaded], [self._ready_mark_of(m) for m in offloaded])
        for index, memory in enumerate(offloaded):
            memory.index = index
        self._num_offloaded = len(offloaded)
        if offloaded:
            _offloads_started[_C.calling_thread()] += 1
        self._ready_marks.clear()
        self.bytes = sum(m.bytes for m in offloaded)

    def release_activation_forward_gpu_memory(self) -> None:
        """Releases the device memory, after the copies to the host, in the order of the current stream."""
        self._check_state("release_activation_forward_gpu_memory", "offload_started")
        self._engine_layer.release()  # first: if it raises, nothing was released
        for memory in self.taken:
            if memory.index is not None and not memory.stays:
                memory.let_go()

    def join(self) -> None:
        """The current stream waits for the copies to the host, which a capture has to join before it ends."""
        self._check_state("join", "offload_started")
        self._engine_layer.join()

    # ---- backward ----

    def start_reload(self) -> None:
        """Starts the copies back to the device, into memory of the current stream."""
        self._check_state("start_reload", "offload_finished")
        self._engine_layer.start_reload()
        self.unpacked = False

    def wait_reload(self) -> None:
        """The current stream waits for the copies back, which a capture has to join before it ends."""
        self._check_state("wait_reload", "reload_started")
        self._engine_layer.wait_reload()

    def pop_tensor(self, saved: object) -> torch.Tensor:
        """The tensor that push_tensor() took, with its shape, strides, dtype and bits."""
        if isinstance(saved, Saved) and getattr(saved.memory, "layer", None) is not self:
            raise RuntimeError(
                "pop_tensor: argument 'saved' was pushed on another layer, wanted one of this layer; pop it there."
            )
        return pop_saved(saved)

    def finish_backward(self) -> None:
        """Releases the reloaded device memory; tensors that are still referenced can be reloaded again."""
        if self.state == "reload_started":
            self._engine_layer.park()

    def release_all_memory(self) -> None:
        """Releases all memory on host and device, after waiting for copies. The tensors of this layer cannot be popped
        any more."""
        for memory in self.taken:
            memory.give_up("was released by release_all_memory()")
            memory.index = None
        self.forget()
        self._ready_marks.clear()
        self._num_offloaded, self.no_pinned_memory = 0, False
        if self._engine_layer is not None:
            self._engine_layer.reset()

    def get_offloaded_total_size_mb(self) -> float:
        """MiB of the latest offload of this layer."""
        return self.bytes / 2**20

    # ---- inside ----

    def _ready_mark_of(self, memory: OffloadedStorage) -> int:
        """The number of the mark; -1 without one, or if a tensor was written after it: then the copy waits for the
        whole layer."""
        mark = self._ready_marks.get(memory.tensor.untyped_storage()._cdata)
        if mark is None or not memory.watched:
            return -1
        return mark.number if all(version == mark.version for _, version in memory.watched) else -1

    def _engine_layer_on(self, device: torch.device) -> _C.OffloadLayer:
        if self._engine_layer is None or (self._device != device and self._engine_layer.state == "not_offloaded"):
            self._device = device
            self._engine_layer = _C.OffloadLayer(self.engines.of(device), self.retain)
            self._ready_marks.clear()
        return self._engine_layer

    def _check_state(self, call: str, state: str) -> None:
        if self.state != state:
            raise RuntimeError(
                f"{call}: the layer is in state '{self.state}', wanted '{state}'. The order of calls is "
                "start_offload, release_activation_forward_gpu_memory, start_reload."
            )

    def _storage_freed(self, index: int) -> None:
        """An offloaded storage is not referenced any more; the last one resets the layer."""
        if self._engine_layer is None:
            return
        self._num_offloaded -= 1
        if self._num_offloaded == 0:
            self._engine_layer.reset()
        else:
            self._engine_layer.drop(index)
