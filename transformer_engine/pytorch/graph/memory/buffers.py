"""Static tensors: what graphs read and write. Hands out memory, takes it back, and fills it with what a call was given;
knows nothing of graphs."""

from collections.abc import Iterable, Sequence

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

    def take_apart(self, like: torch.Tensor) -> torch.Tensor:
        """The same, with memory of its own for each element."""
        return self.take(like.contiguous() if overlapping(like) else like)

    def has(self, like: torch.Tensor) -> bool:
        return bool(self._free.get(form(like)))

    def give(self, tensor: torch.Tensor | None) -> None:
        """The memory of `tensor` may be handed out again; nothing that its last user wrote is read any more."""
        if tensor is not None:
            self._free.setdefault(form(tensor), []).append(tensor.detach())


def version_of(t: torch.Tensor) -> int | None:
    """How often a tensor was written in place; torch does not count it for those of inference mode."""
    return None if t.is_inference() else t._version


def _extent(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))) * t.element_size()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory from the first to the last element of both meets."""
    return a.data_ptr() < b.data_ptr() + _extent(b) and b.data_ptr() < a.data_ptr() + _extent(a)


def dense(t: torch.Tensor) -> bool:
    """Whether it has no gaps: what meets it shares elements with it."""
    return _extent(t) == t.numel() * t.element_size()


def _reaches(target: int, dims: list[tuple[int, int]]) -> bool:
    """Whether a difference of two indices moves by `target`. dims: (step, size), the largest step first."""
    if not dims:
        return target == 0
    (step, size), *rest = dims
    reach = sum(s * (n - 1) for s, n in rest)
    lowest, highest = -((reach - target) // step), (target + reach) // step
    return any(_reaches(target - d * step, rest) for d in range(max(lowest, 1 - size), min(highest, size - 1) + 1))


def overlapping(t: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory. Takes no memory, and little time for any size."""
    dims = sorted(((step, size) for size, step in zip(t.shape, t.stride()) if size > 1), reverse=True)
    if t.numel() < 2:
        return False
    if dims[-1][0] == 0 or t.numel() > 1 + sum(step * (size - 1) for step, size in dims):
        return True
    for i, (step, size) in enumerate(dims):
        reach = sum(s * (n - 1) for s, n in dims[i + 1 :])
        if any(_reaches(d * step, dims[i + 1 :]) for d in range(1, min(size - 1, reach // step) + 1)):
            return True
    return False


def distinct(t: torch.Tensor) -> torch.Tensor:
    """Of elements that an expansion shows many times, one: torch writes to no such tensor."""
    return t[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())]


def neighbourhood(static: Iterable[torch.Tensor | None]) -> tuple[int, int]:
    """(low, high): a tensor with the form of one of these overlaps none unless low < its address < high."""
    found = [(t.data_ptr(), _extent(t)) for t in static if t is not None and t.numel()]
    if not found:
        return 0, 0
    return min(at for at, _ in found) - max(size for _, size in found), max(at + size for at, size in found)


def apart(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target, source) pairs that may be copied one after the other: a source in whose memory a target lies is read
    now."""
    targets = [target for target, _ in moves]
    return [(t, source.clone() if any(overlap(source, other) for other in targets) else source) for t, source in moves]


def fill(
    static: Sequence[torch.Tensor | None],
    addresses: Sequence[int],
    near: tuple[int, int],
    given: Sequence[torch.Tensor | None],
) -> None:
    """Each static tensor gets what was given for it, zeros for None, as if all were read before any is written."""
    low, high = near
    moves, meets = [], False
    for target, address, source in zip(static, addresses, given):
        if source is not None and target is not None:
            at = source.data_ptr()
            if at != address:
                moves.append((target, source))
                meets |= low < at < high
    for target, source in apart(moves) if meets else moves:
        target.copy_(source)
    for target, source in zip(static, given):
        if source is None and target is not None:
            target.zero_()
