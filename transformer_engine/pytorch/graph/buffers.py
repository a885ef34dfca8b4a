"""Static tensors: what graphs read and write. Hands out memory and takes it back; knows nothing of graphs."""

import torch


def form(t: torch.Tensor) -> tuple:
    """Two tensors of one form may use the same memory one after the other."""
    return tuple(t.shape), t.stride(), t.dtype, t.device


class Buffers:
    """Buffers by form. One that was given back is handed out again before a new one is made."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer with the form of `like`; its values mean nothing."""
        free = self._free.get(form(like))
        if free:
            return free.pop()
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def has(self, like: torch.Tensor) -> bool:
        return bool(self._free.get(form(like)))

    def give(self, tensor: torch.Tensor | None) -> None:
        """The memory of `tensor` may be handed out again; nothing that its last user wrote is read any more."""
        if tensor is not None:
            self._free.setdefault(form(tensor), []).append(tensor.detach())
