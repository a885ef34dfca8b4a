"""Static tensors, which graphs read and write: a pool of their memory, overlap tests, and the copy of given values.

- Nothing here depends on graphs.
"""

from collections.abc import Iterable, Sequence

import torch


def layout_key(t: torch.Tensor) -> tuple:
    """Tensors with equal keys can use the same memory one after the other."""
    return tuple(t.shape), t.stride(), t.dtype, t.device


class BufferPool:
    """Free buffers by layout: a released buffer is reused before a new one is allocated."""

    def __init__(self) -> None:
        self._free: dict[tuple, list[torch.Tensor]] = {}

    def acquire(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer with the layout of `like`; its values are undefined."""
        free = self._free.get(layout_key(like))
        if free:
            return free.pop()
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def acquire_dense(self, like: torch.Tensor) -> torch.Tensor:
        """As acquire(), but each element has memory of its own."""
        return self.acquire(like.contiguous() if has_internal_overlap(like) else like)

    def has(self, like: torch.Tensor) -> bool:
        return bool(self._free.get(layout_key(like)))

    def release(self, tensor: torch.Tensor | None) -> None:
        """The memory of `tensor` may be reused; its present values must not be read any more."""
        if tensor is not None:
            self._free.setdefault(layout_key(tensor), []).append(tensor.detach())


def version_of(t: torch.Tensor) -> int | None:
    """The number of in-place writes; None for an inference tensor, for which torch does not count them."""
    return None if t.is_inference() else t._version


def _span_bytes(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last one."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))) * t.element_size()


def spans_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges from the first to the last element of both overlap."""
    return a.data_ptr() < b.data_ptr() + _span_bytes(b) and b.data_ptr() < a.data_ptr() + _span_bytes(a)


def is_dense(t: torch.Tensor) -> bool:
    """Whether the span has no gaps: a tensor that overlaps it then shares elements with it."""
    return _span_bytes(t) == t.numel() * t.element_size()


def _can_offset(target: int, dims: list[tuple[int, int]]) -> bool:
    """Whether two index tuples differ by `target` elements of memory. dims: (step, size), the largest step first."""
    if not dims:
        return target == 0
    (step, size), *rest = dims
    reach = sum(s * (n - 1) for s, n in rest)
    lowest, highest = -((reach - target) // step), (target + reach) // step
    return any(_can_offset(target - d * step, rest) for d in range(max(lowest, 1 - size), min(highest, size - 1) + 1))


def has_internal_overlap(t: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory. Exact; needs no memory, and little time for any size."""
    dims = sorted(((step, size) for size, step in zip(t.shape, t.stride()) if size > 1), reverse=True)
    if t.numel() < 2:
        return False
    if dims[-1][0] == 0 or t.numel() > 1 + sum(step * (size - 1) for step, size in dims):
        return True
    for i, (step, size) in enumerate(dims):
        reach = sum(s * (n - 1) for s, n in dims[i + 1 :])
        if any(_can_offset(d * step, dims[i + 1 :]) for d in range(1, min(size - 1, reach // step) + 1)):
            return True
    return False


def unexpanded(t: torch.Tensor) -> torch.Tensor:
    """A view with one of the elements that an expansion repeats: torch refuses to write to an expanded tensor."""
    return t[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())]


def overlap_range_of(static: Iterable[torch.Tensor | None]) -> tuple[int, int]:
    """(low, high): a tensor with the layout of one of these overlaps none of them unless low < its address < high."""
    found = [(t.data_ptr(), _span_bytes(t)) for t in static if t is not None and t.numel()]
    if not found:
        return 0, 0
    return min(at for at, _ in found) - max(size for _, size in found), max(at + size for at, size in found)


def clone_overlapping_sources(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target, source) pairs that can be copied in sequence: a source that overlaps a target is cloned first."""
    targets = [target for target, _ in copies]
    return [
        (target, source.clone() if any(spans_overlap(source, other) for other in targets) else source)
        for target, source in copies
    ]


def copy_into_static(
    static: Sequence[torch.Tensor | None],
    addresses: Sequence[int],
    overlap_range: tuple[int, int],
    given: Sequence[torch.Tensor | None],
) -> None:
    """Copies the given values into the static tensors, zeros for None. All sources are read before any is written."""
    low, high = overlap_range
    copies, overlaps = [], False
    for target, address, source in zip(static, addresses, given):
        if source is not None and target is not None:
            at = source.data_ptr()
            if at != address:
                copies.append((target, source))
                overlaps |= low < at < high
    for target, source in clone_overlapping_sources(copies) if overlaps else copies:
        target.copy_(source)
    for target, source in zip(static, given):
        if source is None and target is not None:
            target.zero_()
