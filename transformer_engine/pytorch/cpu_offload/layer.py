"""The saved tensors of one layer: which of them leave for the CPU, and how each comes back as the view that it was.
When that happens is the synchronizer's; who waits for whom is the engine's (transformer_engine/offload.h)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.capturing import note_leaving
from transformer_engine.pytorch.cpu_offload.arguments import check_flags, check_stream
from transformer_engine.pytorch.cpu_offload.marks import has_storage, is_marked, keep, stays, taken_apart

MIN_ELEMENTS = 256 * 1024  # a smaller tensor stays where it is, unless it lies in the memory of one that leaves

PinnedMemoryError = _C.PinnedMemoryError

# Told of each tensor that is pushed, and of what stands for it: te.memory_plan.
observers: list[Callable[[torch.Tensor, object], None]] = []


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


def _changed(tensor: torch.Tensor, version: int) -> str:
    return (
        f"is at version {tensor._version}, and was saved at version {version}: an operation in place has changed it "
        "since. Clone it before that operation"
    )


def _refusal(dtype: torch.dtype, shape: torch.Size, why: str) -> RuntimeError:
    return RuntimeError(f"pop_tensor: one of the tensors needed for the gradient, {dtype} {list(shape)}, {why}.")


class Mark(NamedTuple):
    """What was complete when: with the reference no other storage can be taken for this one."""

    number: int
    storage: StorageWeakRef
    version: int


class Memory:
    """A storage that saved tensors of one layer lie in. It lives as long as one of them is still wanted."""

    __slots__ = ("__weakref__", "bytes", "key", "layer", "leaves", "piece", "saved", "tensor", "watched", "written")

    def __init__(self, layer: OffloadableLayerState, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.piece: int | None = None  # its number among what left; first, since __del__ reads it
        self.layer, self.tensor = layer, tensor.detach()
        self.key, self.bytes = storage._cdata, storage.nbytes()
        self.leaves = False  # a tensor in it is large enough
        self.saved: list[weakref.ref[torch.Tensor]] = []  # which may be marked until it has left
        self.watched: list[tuple[torch.Tensor, int]] = []  # with the version each was saved at
        self.written = ""

    @property
    def gone(self) -> bool:
        """Whether the device has nothing of it until it is brought back."""
        return self.tensor is None and not self.written

    @property
    def stays(self) -> bool:
        """Whether it was marked, at any time until now."""
        if stays(self.key):
            return True
        for ref in self.saved:
            t = ref()
            if t is not None and is_marked(t):
                return True
        return False

    def check(self) -> None:
        """Notes the first tensor that was written to, or freed, since it was saved."""
        for tensor, version in self.watched:
            if not self.written and tensor._version != version:
                self.written = _changed(tensor, version)
        if not self.written and self.tensor is not None and self.tensor.untyped_storage().nbytes() != self.bytes:
            self.written = f"had a storage of {self.bytes} bytes, which was resized since. Free it after the backward"

    def let_go(self) -> None:
        """The copy out is waited for: the device memory is not ours any more."""
        self.check()
        self.tensor, self.watched, self.saved = None, [], []

    def __del__(self) -> None:
        if self.piece is not None:
            self.layer._dropped(self.piece)


class Saved:
    """Stands for a saved tensor: where it lies in its memory. Holds no tensor, so that no cycle can come of it."""

    __slots__ = ("__weakref__", "conjugate", "dtype", "memory", "negative", "offset", "shape", "strides")

    def __init__(self, memory: Memory, t: torch.Tensor) -> None:
        self.memory, self.dtype, self.offset = memory, t.dtype, t.storage_offset()
        self.shape, self.strides = t.shape, t.stride()
        self.conjugate, self.negative = t.is_conj(), t.is_neg()  # of the view: memory has the values without

    def pop(self) -> torch.Tensor:
        return self.memory.layer.pop_tensor(self)

    def seen(self, t: torch.Tensor) -> torch.Tensor:
        """What lies in the memory, as the saved tensor saw it."""
        t = t.conj() if self.conjugate else t
        return torch._neg_view(t) if self.negative else t


class Kept:
    """Stands for a tensor that stays where it is. torch looks at no version of what hooks hold, so this does."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = None if self.tensor.is_inference() else self.tensor._version

    def pop(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise _refusal(self.tensor.dtype, self.tensor.shape, _changed(self.tensor, self.version))
        return self.tensor


class Composed:
    """A quantized tensor: the object without its parts, and what stands for them."""

    __slots__ = ("parts", "shell")

    def __init__(self, tensor: object, push: Callable[[torch.Tensor], object]) -> None:
        parts, self.shell = taken_apart(tensor)
        there = [part for part in parts if part is not None]
        if is_marked(tensor) or any(is_marked(part) for part in there):
            keep(there)  # all of them: a tensor of which a part has to come back is not there
        self.parts = [None if part is None else push(part) for part in parts]

    def pop(self) -> object:
        self.shell.restore_from_saved([None if part is None else part.pop() for part in self.parts])
        whole, (_, self.shell) = self.shell, taken_apart(self.shell)
        return whole


def pop_saved(saved: object) -> object:
    """The tensor that `saved` stands for. A tensor stands for itself."""
    if isinstance(saved, (Saved, Kept, Composed)):
        return saved.pop()
    if not isinstance(saved, torch.Tensor):
        raise TypeError(f"pop_tensor: argument 'saved' is a {type(saved).__name__}, wanted what push_tensor() gave.")
    return saved


def _is_parameter(t: object) -> bool:
    return isinstance(t, torch.nn.Parameter) or isinstance(getattr(t, "_base", None), torch.nn.Parameter)


class OffloadableLayerState:
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
        self._memory: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._marks: dict[int, Mark] = {}  # of storages
        self._pieces = 0  # that left and are still wanted
        self.popped = False  # since they were brought back
        self.bytes = 0  # that left last
        self.stayed = False  # there was no pinned memory for it

    @property
    def wanted(self) -> bool:
        """Whether something saved here is still to be read."""
        return len(self._memory) > 0

    @property
    def empty(self) -> bool:
        """Whether nothing that left is still to be read: a frozen layer's, from the start."""
        return self._pieces == 0

    @property
    def state(self) -> str:
        return "not_offloaded" if self._layer is None else self._layer.state

    def __repr__(self) -> str:
        return f"OffloadableLayerState({self.state}, {len(self._memory)} storages, {self.bytes} bytes offloaded)"

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

    def push_tensor(self, tensor: torch.Tensor) -> object:
        """What stands for the tensor until pop_tensor(). It stays where it is until start_offload()."""
        if hasattr(tensor, "prepare_for_saving") and not _is_parameter(tensor):
            return Composed(tensor, self.push_tensor)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"push_tensor: argument 'tensor' is a {type(tensor).__name__}, wanted a torch.Tensor.")
        saved = self._push_plain(tensor)
        for observe in observers:
            observe(tensor, saved)
        return saved

    def _push_plain(self, tensor: torch.Tensor) -> object:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_storage(tensor)
        if not plain or _is_parameter(tensor):
            return Kept(tensor)
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata) if self.state == "not_offloaded" else None
        if memory is None:
            memory = Memory(self, tensor, storage)
            if self.state == "not_offloaded":
                self._memory[memory.key] = memory
        if is_marked(tensor):
            keep([tensor])  # the object that carries the mark may be gone soon
        memory.saved.append(weakref.ref(tensor))
        memory.leaves |= tensor.numel() >= MIN_ELEMENTS
        if not tensor.is_inference():
            memory.watched.append((tensor.detach(), tensor._version))
        return Saved(memory, tensor)

    def start_offload(self) -> None:
        """What may leave starts to, behind what the current stream has been given so far."""
        self._want("start_offload", "not_offloaded")
        self.stayed = False
        leaving = [m for m in list(self._memory.values()) if m.leaves and not m.stays]
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
        for memory in list(self._memory.values()):
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
        if not isinstance(saved, Saved):
            return pop_saved(saved)
        if saved.memory.layer is not self:
            raise RuntimeError("pop_tensor: argument 'saved' is another layer's; pop it where it was pushed.")
        self.popped, memory = True, saved.memory
        if memory.tensor is not None:
            memory.check()
        if memory.written:
            raise _refusal(saved.dtype, saved.shape, memory.written)
        if memory.tensor is not None:
            back = memory.tensor.new_empty(0, dtype=saved.dtype).set_(
                memory.tensor.untyped_storage(), saved.offset, saved.shape, saved.strides
            )
        else:
            back = self._layer.pop(memory.piece, saved.dtype, saved.offset, saved.shape, saved.strides)
        return saved.seen(back)

    def finish_backward(self) -> None:
        """The device memory that came back is given up; what is wanted still comes back again from the host."""
        if self.state == "reload_started":
            self._layer.park()

    def release_all_memory(self) -> None:
        """Everything is given up, on the host and the device; what is under way is waited for. The tensors of this
        layer cannot be popped any more."""
        for memory in list(self._memory.values()):
            memory.let_go()
            memory.written = "was given up by release_all_memory()"
            memory.piece = None
        self._memory.clear()
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
