"""Storages by their identity: which tensors have one, and what is known of one as long as it lives."""

from __future__ import annotations

import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def has_storage(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not (t.is_meta or t.is_nested or t.is_quantized)


class Storages:
    """Storage -> value. Weak: an entry ends with the memory, and no later storage can be taken for it meanwhile."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, object]] = {}
        self._lock = threading.Lock()
        self._sweep_at = 64

    def put(self, storage: torch.UntypedStorage, value: object = True) -> None:
        with self._lock:
            if len(self._known) >= self._sweep_at:
                self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
                self._sweep_at = max(64, 2 * len(self._known))
            self._known[storage._cdata] = StorageWeakRef(storage), value

    def get(self, cdata: int) -> object:
        """Of a storage that is alive, by its address; None where nothing is known of it."""
        entry = self._known.get(cdata)
        return None if entry is None or entry[0].expired() else entry[1]
