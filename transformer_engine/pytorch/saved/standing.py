"""What stands for a saved tensor until a backward wants it. A tensor that stays is watched for changes; one that a
client took comes back as the view that it was, of memory that all views share. Who takes what is the client's."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from transformer_engine.pytorch.saved.marks import is_marked, keep, stays, taken_apart
from transformer_engine.pytorch.saved.storages import has_storage


def is_parameter(t: object) -> bool:
    return isinstance(t, torch.nn.Parameter) or isinstance(getattr(t, "_base", None), torch.nn.Parameter)


def is_movable(t: torch.Tensor) -> bool:
    """Whether its memory may be taken at all: it is no parameter's, and not a class's of its own."""
    return type(t) is torch.Tensor and has_storage(t) and not is_parameter(t)


def _changed(tensor: torch.Tensor, version: int) -> str:
    return (
        f"is at version {tensor._version}, and was saved at version {version}: an operation in place has changed it "
        "since. Clone it before that operation"
    )


def _resized(size: int) -> str:
    return f"had a storage of {size} bytes, which was resized since. Free it after the backward"


def _refusal(dtype: torch.dtype, shape: torch.Size, why: str) -> RuntimeError:
    return RuntimeError(f"pop_tensor: one of the tensors needed for the gradient, {dtype} {list(shape)}, {why}.")


class Taken:
    """A storage that a client took, whole, for all saved tensors that lie in it; it lives as long as one of them is
    wanted. Clients derive from it and say restore().

    The device memory is held, and every saved tensor's version watched, until the client has a copy and calls
    let_go(). status, back: what te.memory_plan says of it, and of what bringing it back costs.
    """

    __slots__ = ("__weakref__", "bytes", "key", "saved", "tensor", "watched", "written")

    status, back = "kept", ""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor: torch.Tensor | None = tensor.detach()
        self.key, self.bytes = storage._cdata, storage.nbytes()
        self.saved: list[weakref.ref[torch.Tensor]] = []  # which may be marked until it has left
        self.watched: list[tuple[torch.Tensor, int]] = []  # with the version each was saved at
        self.written = ""  # why nothing of it can be read any more

    def add(self, tensor: torch.Tensor) -> None:
        """One more saved tensor lies in it."""
        if self.tensor is None:
            return
        self.saved.append(weakref.ref(tensor))
        if not tensor.is_inference():
            self.watched.append((tensor.detach(), tensor._version))

    def fetch(self) -> None:
        """A backward is about to read it: the client may start to bring it back."""

    def restore(self) -> torch.Tensor:
        """A tensor over as many bytes as the storage had, with what was in them. Asked for behind let_go() alone, once
        for each saved tensor and backward."""
        raise NotImplementedError(f"{type(self).__name__}: restore() is the client's to say.")

    def back_as(self, saved: Saved) -> torch.Tensor:
        """The memory as a saved tensor lay in it."""
        if self.tensor is not None:
            self.check()
        if self.written:
            raise _refusal(saved.dtype, saved.shape, self.written)
        whole = self.restore() if self.tensor is None else self.tensor
        return whole.new_empty(0, dtype=saved.dtype).set_(
            whole.untyped_storage(), saved.offset, saved.shape, saved.strides
        )

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
            self.written = _resized(self.bytes)

    def let_go(self) -> None:
        """The client has a copy that is complete: the device memory is not ours any more."""
        self.check()
        self.tensor, self.watched, self.saved = None, [], []

    def give_up(self, why: str) -> None:
        """There is no copy either: who reads it from now on is told why."""
        self.let_go()
        self.written = why


class Saved:
    """Where a saved tensor lies in memory that was taken. Holds no tensor, so that no cycle can come of it."""

    __slots__ = ("__weakref__", "conjugate", "dtype", "memory", "negative", "offset", "shape", "strides")

    def __init__(self, memory: Taken, t: torch.Tensor) -> None:
        self.memory, self.dtype, self.offset = memory, t.dtype, t.storage_offset()
        self.shape, self.strides = t.shape, t.stride()
        self.conjugate, self.negative = t.is_conj(), t.is_neg()  # of the view: memory has the values without

    @property
    def status(self) -> str:
        return self.memory.status

    @property
    def back(self) -> str:
        return self.memory.back

    def fetch(self) -> None:
        self.memory.fetch()

    def pop(self) -> torch.Tensor:
        t = self.memory.back_as(self)
        t = t.conj() if self.conjugate else t
        return torch._neg_view(t) if self.negative else t


class Kept:
    """A tensor that stays where it is. torch looks at no version of what hooks hold, so this does. That a parameter's
    memory is away in between, sharded, is its owner's."""

    __slots__ = ("__weakref__", "bytes", "tensor", "version")

    status, back = "kept", ""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = None if self.tensor.is_inference() else self.tensor._version
        self.bytes = self.tensor.untyped_storage().nbytes() if is_movable(tensor) else None

    def fetch(self) -> None: ...

    def pop(self) -> torch.Tensor:
        t = self.tensor
        if self.version is not None and t._version != self.version:
            raise _refusal(t.dtype, t.shape, _changed(t, self.version))
        if self.bytes is not None and t.untyped_storage().nbytes() != self.bytes:
            raise _refusal(t.dtype, t.shape, _resized(self.bytes))
        return t


class Foreign:
    """A tensor that hooks around ours have packed: it is theirs, checks included."""

    __slots__ = ("packed", "unpack")

    def __init__(self, hooks: tuple[Callable, Callable], tensor: torch.Tensor) -> None:
        pack, self.unpack = hooks
        self.packed = pack(tensor)

    def fetch(self) -> None: ...

    def pop(self) -> torch.Tensor:
        return self.unpack(self.packed)


class Composed:
    """A quantized tensor: the object without its parts, and what stands for them."""

    __slots__ = ("parts", "shell")

    def __init__(self, tensor: object, push: Callable[[torch.Tensor], object]) -> None:
        parts, self.shell = taken_apart(tensor)
        there = [part for part in parts if part is not None]
        if is_marked(tensor) or any(is_marked(part) for part in there):
            keep(there)  # all of them: a tensor of which a part has to come back is not there
        self.parts = [None if part is None else push(part) for part in parts]

    def fetch(self) -> None:
        for part in self.parts:
            if part is not None:
                part.fetch()

    def pop(self) -> object:
        self.shell.restore_from_saved([None if part is None else part.pop() for part in self.parts])
        whole, (_, self.shell) = self.shell, taken_apart(self.shell)
        return whole


def pop_saved(saved: object) -> object:
    """The tensor that `saved` stands for. A tensor stands for itself."""
    if isinstance(saved, (Saved, Kept, Foreign, Composed)):
        return saved.pop()
    if not isinstance(saved, torch.Tensor):
        raise TypeError(f"pop_tensor: argument 'saved' is a {type(saved).__name__}, wanted what push_tensor() gave.")
    return saved


def unpack(saved: object) -> object:
    """The same in a backward: what is away is brought back first, all parts of it at once."""
    if isinstance(saved, (Saved, Composed)):
        saved.fetch()
    return pop_saved(saved)
