"""Files of torch.save, new and old, and pickled tensors, as plain data: torch's own reader is not used. Tensors are of
floats, dense, and no larger than their bytes."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.quantization.checkpoint.pickles import Machine, Name, Record, Unreadable

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files that are older than the zip archives
_REBUILD = "torch._utils._rebuild_tensor_v2"
# The second: importing megatron-core puts it in the place of the first, so that tensors pickled after that name it.
FROM_BYTES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
_BYTES_OF_TEXT = "_codecs.encode"  # protocol 2 writes bytes with it
_DTYPES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
_LARGEST = 1 << 40  # the largest size, stride and offset
_MOST_DIMENSIONS = 8


class _Storage:
    """A tensor's memory; bytes_of(key) reads it from its file."""

    __slots__ = ("bytes_of", "count", "dtype", "key")

    def __init__(self, identity: object, bytes_of: Callable[[str], bytes]) -> None:
        kind, name, key, _, count = identity[:5] if type(identity) is tuple and len(identity) >= 5 else (None,) * 5
        plain = [type(part) for part in (kind, name, key, count)] == [str, Name, str, int]
        if not plain or kind != "storage" or name not in _DTYPES or not 0 <= count <= _LARGEST:
            raise Unreadable("refers to something outside of it that is not a storage of floats")
        self.dtype, self.key, self.count, self.bytes_of = _DTYPES[name], key, count, bytes_of

    def values(self) -> torch.Tensor:
        data = self.bytes_of(self.key)
        if len(data) != self.count * self.dtype.itemsize:
            raise Unreadable(f"has {len(data)} bytes for {self.count} numbers")
        return torch.frombuffer(bytearray(data), dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)


@contextmanager
def _one_error() -> Iterator[None]:
    try:
        yield
    except Unreadable:
        raise
    except Exception as error:  # arbitrary bytes make parsers fail in many ways
        raise Unreadable(f"is damaged: {type(error).__name__}") from None


def read(data: bytes, may_call: Callable[[str], bool]) -> tuple[object, list[Name]]:
    """(its value, every name in it) of a pickle, or of a file of torch.save. may_call(name): whether it may be called,
    besides the functions that make tensors. Errors: Unreadable."""

    def known(name: str) -> bool:
        return name in (_REBUILD, *FROM_BYTES, _BYTES_OF_TEXT) or may_call(name)

    with _one_error():
        if data[:4] == b"PK\x03\x04":
            return _read_archive(data, known)
        file, machine = io.BytesIO(data), Machine(known)
        value = machine.run(file)
        if type(value) is int and value == _MAGIC:
            return _read_old(file, known)
        return value, machine.names


def _read_archive(data: bytes, known: Callable) -> tuple[object, list[Name]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}

    def entry(name: str) -> bytes:
        found = entries.get(name)
        if found is None or found.compress_type != zipfile.ZIP_STORED or found.file_size > len(data):
            raise Unreadable(f"lacks {name!r:.60}, or has packed it")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read(found)

    roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise Unreadable("is an archive that torch.save has not written")
    order = f"{roots[0]}byteorder"
    if order in entries and entry(order) != b"little":
        raise Unreadable("was written on a machine of the other byte order")
    machine = Machine(known, lambda identity: _Storage(identity, lambda key: entry(f"{roots[0]}data/{key}")))
    return machine.run(io.BytesIO(entry(f"{roots[0]}data.pkl"))), machine.names


def _read_old(file: io.BytesIO, known: Callable) -> tuple[object, list[Name]]:
    """After the magic: protocol, system, value, the storages' keys, and for each of these its length and its bytes."""
    protocol, system = (Machine(known).run(file) for _ in range(2))
    if protocol != _PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise Unreadable("is of another protocol of torch.save, or of a machine of the other byte order")
    storages: dict[str, _Storage] = {}
    kept: dict[str, bytes] = {}

    def storage_of(identity: object) -> _Storage:
        found = _Storage(identity, lambda key: kept.get(key, b""))
        return storages.setdefault(found.key, found)

    machine = Machine(known, storage_of)
    value = machine.run(file)
    keys = Machine(known).run(file)
    for key in keys if type(keys) is list else ():
        if type(key) is not str or key not in storages:
            raise Unreadable("has bytes of no tensor")
        file.read(8)  # the number of elements, which the reference has given
        kept[key] = file.read(storages[key].count * storages[key].dtype.itemsize)
    return value, machine.names


def _bytes(value: object) -> bytes:
    if type(value) is Record and value.name == _BYTES_OF_TEXT and type(value.arguments[0]) is str:
        return value.arguments[0].encode("latin1")
    if type(value) is not bytes:
        raise Unreadable("has a storage that is not bytes")
    return value


def tensor_of(value: object) -> torch.Tensor | None:
    """The tensor that `read` found, as float32 on the CPU, in memory of its own; None for anything else. Errors:
    Unreadable if its shape and its bytes do not fit together."""
    if type(value) is not Record or value.name != _REBUILD:
        return None
    with _one_error():
        storage, offset, size, stride = value.arguments[:4]
        if type(storage) is Record and storage.name in FROM_BYTES:
            storage = read(_bytes(storage.arguments[0]), lambda name: False)[0]
        valid = all(
            type(numbers) is tuple and all(type(n) is int and 0 <= n <= _LARGEST for n in numbers)
            for numbers in (size, stride, (offset,))
        )
        if type(storage) is not _Storage or not valid or len(size) != len(stride) or len(size) > _MOST_DIMENSIONS:
            raise Unreadable("has a tensor that is not a plain one")
        count = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if count > storage.count or (count and last >= storage.count):  # also an expanded one, which would be filled
            raise Unreadable(f"has a tensor {list(size)} in {storage.count} numbers")
        return storage.values().as_strided(size, stride, offset).float().contiguous() if count else torch.zeros(size)
