"""The saved tensors of one layer, a client of the saved door: which of them leave for the CPU, and how they come back.
When that happens is the synchronizer's; who waits for whom is the engine's (transformer_engine/offload.h)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.cpu_offload.arguments import check_flags, check_stream
from transformer_engine.pytorch.cpu_offload.leaving import note_leaving
from transformer_engine.pytorch.saved import PackedStorage, Saved, StorageHandler, pop_saved
from transformer_engine.pytorch.saved.marks import has_storage

MIN_ELEMENTS = 256 * 1024  # a smaller tensor stays where it is, unless it lies in the memory of one that leaves

PinnedMemoryError = _C.PinnedMemoryError


class Engines:
    """One engine a device, made when the first tensor there leaves. options: _C.OffloadEngine's."""

    def __init__(self, stream: torch.cuda.Stream | None = None, **options: object) -> None:
        check_stream("OffloadableLayerState", stream)
        self.options = {"stream": 0 if stream is None else stream.cuda_stream, **options}
        self._stream = stream  # alive as long as the engine copies on it
        self._engines: dict[torch.device, _C.OffloadEngine] = {}

    def of(self, device: torch.device) -> _C.OffloadEngine:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._engines:
            self._engines[device] = _C.OffloadEngine(device, **self.options)
        return self._engines[device]

    def __iter__(self):
        return iter(self._engines.items())


class Mark(NamedTuple):
    """What was complete when: with the reference no other storage can be taken for this one."""

    number: int
    storage: StorageWeakRef
    version: int


class Memory(PackedStorage):
    """A storage that saved tensors of one layer lie in, which may leave."""

    __slots__ = ("layer", "leaves", "piece")

    back = "nothing: it comes back from the host"

    def __init__(self, layer: OffloadableLayerState, tensor: torch.Tensor) -> None:
        self.piece: int | None = None  # its number among what left; first, since __del__ reads it
        super().__init__(tensor)
        self.layer = layer
        self.leaves = False  # a tensor in it is large enough

    @property
    def status(self) -> str:
        return "kept" if self.piece is None else "offloaded"

    def add(self, tensor: torch.Tensor) -> None:
        super().add(tensor)
        self.leaves |= tensor.numel() >= MIN_ELEMENTS

    def fetch(self) -> None:
        """What nobody has brought back yet is brought back now."""
        if self.away and self.layer.state == "offload_finished":
            self.layer.start_reload()

    def back_as(self, saved: Saved) -> torch.Tensor:
        self.layer.popped = True
        if not self.away:
            return super().back_as(saved)
        return self.layer._layer.pop(self.piece, saved)

    def __del__(self) -> None:
        if self.piece is not None:
            self.layer._dropped(self.piece)


class OffloadableLayerState(StorageHandler):
    """One layer's saved tensors, from the forward that saves them to the last backward that reads them.

    States: not_offloaded, offload_started, offload_finished, reload_started. A call in the wrong one is a RuntimeError
    that names both.
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
        self._layer: _C.OffloadLayer | None = None
        super().__init__()
        self._marks: dict[int, Mark] = {}  # of storages
        self._pieces = 0  # that left and are still wanted
        self.popped = False  # since they were brought back
        self.bytes = 0  # that left last
        self.stayed = False  # there was no pinned memory for it

    @property
    def wanted(self) -> bool:
        """Whether something saved here is still to be read."""
        return bool(self.taken)

    @property
    def empty(self) -> bool:
        """Whether nothing that left is still to be read: a frozen layer's, from the start."""
        return self._pieces == 0

    @property
    def state(self) -> str:
        return "not_offloaded" if self._layer is None else self._layer.state

    def __repr__(self) -> str:
        return f"OffloadableLayerState({self.state}, {len(self.taken)} storages, {self.bytes} bytes offloaded)"

    # ---- forward ----

    def mark_ready(self, tensors: list[torch.Tensor], whole: bool = False) -> None:
        """What these hold is complete: when the layer leaves, they need not wait for what comes after this call. A
        tensor that is a part of its memory says nothing of the rest; `whole` says that the rest is complete too."""
        tensors = [t for t in tensors if has_storage(t) and not t.is_inference()]
        tensors = [t for t in tensors if whole or (t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes())]
        tensors = [t for t in tensors if t.is_cuda] or tensors
        if not tensors or self.state != "not_offloaded":
            return
        mark = self._machine(tensors[0].device).mark()
        for t in tensors:
            storage = t.untyped_storage()
            self._marks[storage._cdata] = Mark(mark, StorageWeakRef(storage), t._version)

    @property
    def takes(self) -> bool:
        return self.state == "not_offloaded"

    def take(self, tensor: torch.Tensor) -> Memory | None:
        """Nothing that is too small itself, and lies in no memory that a tensor large enough could lie in too."""
        small = tensor.numel() < MIN_ELEMENTS and tensor.untyped_storage().nbytes() < MIN_ELEMENTS
        return None if small else Memory(self, tensor)

    def push_tensor(self, tensor: torch.Tensor) -> object:
        """What stands for the tensor until pop_tensor(). It stays where it is until start_offload()."""
        return self.push(tensor)

    def start_offload(self) -> None:
        """What may leave starts to, behind what the current stream has been given so far."""
        self._want("start_offload", "not_offloaded")
        self.stayed = False
        leaving = [m for m in self.taken if m.leaves and not m.stays]
        devices = {m.tensor.device for m in leaving}
        device = min(devices, key=lambda d: (d.type == "cpu", d.index or 0), default=torch.device("cpu"))
        leaving = [m for m in leaving if m.tensor.device == device]  # host memory stays where device memory leaves
        for memory in leaving:
            memory.check()
        machine = self._machine(device)
        machine.start([m.tensor for m in leaving], [self._mark_of(m) for m in leaving])
        for piece, memory in enumerate(leaving):
            memory.piece = piece
        self._pieces = len(leaving)
        if leaving:
            note_leaving()
        self._marks.clear()
        self.bytes = sum(m.bytes for m in leaving)

    def release_activation_forward_gpu_memory(self) -> None:
        """Behind the copy out, in the current stream, the device memory is given up."""
        self._want("release_activation_forward_gpu_memory", "offload_started")
        self._layer.release()  # first: where it refuses, everything is still there
        for memory in self.taken:
            if memory.piece is not None and not memory.stays:
                memory.let_go()

    def join(self) -> None:
        """The current stream waits for the copy out, as a capture that forked it must before it ends."""
        self._want("join", "offload_started")
        self._layer.join()

    # ---- backward ----

    def start_reload(self) -> None:
        """The copies start to come back, into memory of the current stream."""
        self._want("start_reload", "offload_finished")
        self._layer.start_reload()
        self.popped = False

    def wait_reload(self) -> None:
        """The current stream waits for the copies, as a capture that forked them must before it ends."""
        self._want("wait_reload", "reload_started")
        self._layer.wait_reload()

    def pop_tensor(self, saved: object) -> torch.Tensor:
        """The tensor that push_tensor() took, with its shape, strides, dtype and bits."""
        if isinstance(saved, Saved) and getattr(saved.memory, "layer", None) is not self:
            raise RuntimeError("pop_tensor: argument 'saved' is another layer's; pop it where it was pushed.")
        return pop_saved(saved)

    def finish_backward(self) -> None:
        """The device memory that came back is given up; what is wanted still comes back again from the host."""
        if self.state == "reload_started":
            self._layer.park()

    def release_all_memory(self) -> None:
        """Everything is given up, on the host and the device; what is under way is waited for. The tensors of this
        layer cannot be popped any more."""
        for memory in self.taken:
            memory.give_up("was given up by release_all_memory()")
            memory.piece = None
        self.forget()
        self._marks.clear()
        self._pieces, self.stayed = 0, False
        if self._layer is not None:
            self._layer.reset()

    def get_offloaded_total_size_mb(self) -> float:
        """MiB that left when this layer was last offloaded."""
        return self.bytes / 2**20

    # ---- inside ----

    def _mark_of(self, memory: Memory) -> int:
        """-1: the copy waits for the whole layer, as it does where something was written after the mark."""
        mark = self._marks.get(memory.tensor.untyped_storage()._cdata)
        if mark is None or mark.storage.expired() or not memory.watched:
            return -1
        return mark.number if all(version == mark.version for _, version in memory.watched) else -1

    def _machine(self, device: torch.device) -> _C.OffloadLayer:
        if self._layer is None or (self._device != device and self._layer.state == "not_offloaded"):
            self._device = device
            self._layer = _C.OffloadLayer(self.engines.of(device), self.retain)
            self._marks.clear()
        return self._layer

    def _want(self, call: str, state: str) -> None:
        if self.state != state:
            raise RuntimeError(
                f"{call}: the layer is in state '{self.state}', but this call wants '{state}'. "
                "The order is start_offload, release_activation_forward_gpu_memory, start_reload."
            )

    def _dropped(self, piece: int) -> None:
        """A memory that left is wanted by nobody any more; with the last one the whole layer is."""
        if self._layer is None:
            return
        self._pieces -= 1
        if self._pieces == 0:
            self._layer.reset()
        else:
            self._layer.drop(piece)
