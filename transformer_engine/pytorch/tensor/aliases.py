"""Quantized tensors that share memory: aliases, and rows of one another, each with its own directions. A write through
one updates the directions that only others hold, at once and in their memory: a captured graph may read them without
asking. Nothing waits for the device, and no tensor is kept alive."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE


class _Member:
    """The data of a tensor for the others of its family: its present parts, its shape, the number of its first element.
    It dies with the tensor; a weak reference to the tensor itself would prevent torch.utils.swap_tensors."""

    __slots__ = ("__weakref__", "first", "parts", "shape")

    def __init__(self, parts: dict[str, Any], shape: Sequence[int], first: int) -> None:
        self.parts, self.shape, self.first = parts, tuple(shape), first


class Aliases:
    """The part of a quantized storage that records which others share its memory.

    _family: members of all of them, _member: its own; None: it has had no alias yet."""

    _family: "weakref.WeakSet[_Member] | None" = None
    _member: _Member | None = None

    def _join(self, other: "Aliases") -> None:
        """It shares other's memory from now on, or views of it."""
        if not any(self._of_direction(kind) for kind in DATA):
            return  # one set of values serves both
        if other._family is None:
            other._enter(weakref.WeakSet())
        self._enter(other._family)

    def _enter(self, family: "weakref.WeakSet[_Member]") -> None:
        first = 0 if self._rows_of is None else self._rows_of[1]
        self._member = _Member({name: getattr(self, name) for name in self._parts}, self.size(), first)
        self._family = family
        family.add(self._member)

    def _leave(self) -> None:
        self._family = self._member = None

    def _part_set(self, name: str, value: Any) -> None:
        """Runs when a part is set: a part that was missing is derived from the other direction. A replaced part means
        other memory; without any data it shares nothing."""
        parts = self._member.parts
        if value is not None and parts[name] is not None and value is not parts[name]:
            self._leave()
            return
        parts[name] = value
        if value is None and all(parts[n] is None for kind in DATA for n in self._of_direction(kind)):
            self._leave()

    # ---- writes ----

    def _stale(self) -> list[tuple[_Member, list[str]]]:
        """Members with directions in other memory: a write to this tensor does not reach them by itself."""
        if self._family is None or len(self._family) < 2:
            return []
        usages, mine = self.get_usages(), self._member.parts
        others = [member for member in list(self._family) if member is not self._member]
        if usages[COLUMNWISE] and all(theirs is mine[n] for member in others for n, theirs in member.parts.items()):
            return []  # plain aliases, and no direction that must not be read
        data = {kind: self._of_direction(kind)[0] for kind in DATA}
        own = {kind: getattr(self, name) if usages[kind] else None for kind, name in data.items()}
        found = []
        for member in others:
            held = {kind: part for kind, name in data.items() if (part := member.parts[name]) is not None}
            stale = [kind for kind, part in held.items() if not _share_memory(part, own[kind])]
            if stale and all(map(_has_memory, held.values())):
                found.append((member, stale))
        return found

    def _must_reach_aliases(self) -> None:
        """Raises if a write would leave an alias with two directions of different values."""
        if self._family is None or self._derivable():
            return
        for _, (kind, *_) in self._stale():
            raise NotImplementedError(
                f"{type(self).__name__}: it cannot be written, because an alias of it holds {kind} data in memory of "
                "its own that cannot be derived from the other direction; write to that alias, drop its data "
                f"(update_usage({kind}_usage=False)), or write to a clone()."
            )

    def _reach_aliases(self) -> None:
        """Runs after a write: updates the directions that others hold."""
        if not (stale := self._stale()):
            return
        self._must_reach_aliases()
        with torch.inference_mode():  # their memory may come from inference mode
            for member, kinds in stale:
                result = self._recomputed(member, kinds)
                for name in (n for kind in kinds for n in self._of_direction(kind)):
                    member.parts[name].copy_(getattr(result, name))
        parts = [member.parts[n] for member, kinds in stale for kind in kinds for n in self._of_direction(kind)]
        torch.autograd.graph.increment_version([part for part in parts if not part.is_inference()])

    def _recomputed(self, member: _Member, kinds: Sequence[str]) -> "Aliases":
        """A tensor with these directions for the member: derived from its other direction, which has been written, or
        from the data of this tensor."""
        gone = {name for kind in kinds for name in self._of_direction(kind)}
        parts = {name: part for name, part in member.parts.items() if part is not None and name not in gone}
        if not any(name in parts for kind in DATA for name in self._of_direction(kind)):
            parts = self._rowwise_of(member)
        result = self._like(parts, member.shape)
        result.update_usage(**{f"{kind}_usage": True for kind in kinds})
        return result

    def _rowwise_of(self, member: _Member) -> dict[str, torch.Tensor | None]:
        """The member's rowwise parts, from those of this tensor."""
        first, count = member.first - (0 if self._rows_of is None else self._rows_of[1]), math.prod(member.shape)
        if first < 0 or first + count > self.numel():
            raise RuntimeError(
                f"{type(self).__name__}: it is rows of a tensor that has dropped the data that they share; write to "
                "the whole tensor."
            )
        source = self._twin()
        source.update_usage(rowwise_usage=True)
        (name,) = self._names(ROWWISE)
        if self._names("scale"):
            data = getattr(source, name).reshape(-1)[first : first + count]
            parts = {n: getattr(source, n) for n in self._names("scale")}
        else:
            source.update_usage(columnwise_usage=False)
            matrix, (rows, cols) = layout.fold(self.size()), layout.fold(member.shape)
            start = first // max(cols, 1)
            parts = source._like(source._viewed(matrix), matrix)._rows(start, start + rows)
            data = parts[name]
        return {**parts, name: data.view(member.shape)}


def _share_memory(part: Any, other: Any) -> bool:
    if part is other or other is None:
        return part is other
    if not _is_plain(part) or not _is_plain(other):  # a tensor of two formats has quantized tensors as parts
        return getattr(part, "_family", None) is not None and part._family is other._family
    (start, end), (first, last) = _span(part), _span(other)
    return start < last and first < end


def _is_plain(part: Any) -> bool:
    return type(part) in (torch.Tensor, torch.nn.Parameter)


def _span(part: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of its elements and after the last one."""
    reach = sum((n - 1) * stride for n, stride in zip(part.shape, part.stride())) + 1 if part.numel() else 0
    return part.data_ptr(), part.data_ptr() + reach * part.element_size()


def _has_memory(part: Any) -> bool:
    """Whether there is memory to write: not if it is traced, on the meta device, or freed."""
    if not _is_plain(part):
        return hasattr(part, "_family")
    return not part.is_meta and part.numel() > 0 and part.untyped_storage().nbytes() > 0
