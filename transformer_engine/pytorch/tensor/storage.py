"""The base of every quantized tensor, with or without torch.Tensor's behaviour. A format declares its parts and answers
a few questions (parts.py); views, copies, saving for backward, pickling and sharding follow from the declaration."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch.tensor import engine, layout, pickling
from transformer_engine.pytorch.tensor.aliases import Aliases
from transformer_engine.pytorch.tensor.fields import MarkField, PartField
from transformer_engine.pytorch.tensor.layout import DATA
from transformer_engine.pytorch.tensor.parts import Parts
from transformer_engine.pytorch.tensor.registry import FLOATS, FORMATS, AnyQuantized
from transformer_engine.pytorch.tensor.rows import Rows
from transformer_engine.pytorch.tensor.sharding import Sharding
from transformer_engine.pytorch.tensor.subviews import Subviews
from transformer_engine.pytorch.tensor.writes import Writes


class QuantizedTensorStorage(Parts, Writes, Subviews, Sharding, Rows, Aliases, AnyQuantized):
    """The data of a quantized tensor and the scales that turn it into values."""

    _TE_do_not_offload = MarkField()
    _quantizer: Any = None  # quantizes new values
    _bookkeeping: ClassVar[tuple[str, ...]] = (
        "_dtype",
        "_handle",
        "_amax",
        "_transpose_invalid",
        "_saved",
        "_gave",
        "_rows_of",
        "_family",
        "_member",
        "_keeps_columnwise",
        "_columnwise_set_aside",
    )
    _keeps_columnwise = False  # its memory has another user: a captured graph, FSDP2

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("_parts", ()):
            setattr(cls, name, PartField(name))
        FORMATS.setdefault(cls.__name__, cls)

    def __new__(
        cls, *args: object, device: torch.device | None = None, fake_dtype: torch.dtype | None = None
    ) -> "QuantizedTensorStorage":
        if cls is QuantizedTensorStorage or args:
            raise TypeError(f"{cls.__name__}: make one by a quantizer, or a format's class from its parts by name.")
        self = object.__new__(cls)
        self._dtype = torch.float32 if fake_dtype is None else fake_dtype
        return self

    # ---- as a tensor ----

    def size(self, dim: int | None = None) -> torch.Size | int:
        shape = torch.Size(self._logical_shape())
        return shape if dim is None else shape[dim]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._logical_shape())

    @property
    def device(self) -> torch.device:
        for t in self._tensors().values():
            return t.device
        raise RuntimeError(f"{type(self).__name__}: it holds no data (cleared, or saved for backward); quantize again.")

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype: of the values, not of the data."""
        return self._dtype

    def numel(self) -> int:
        return self.size().numel()

    def view(self, *shape: int | Sequence[int]) -> "QuantizedTensorStorage":
        """Shares memory. Errors: ValueError if the data would need another layout."""
        given = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
        wanted = tuple(torch.empty(self.size(), device="meta").view(given).shape)
        parts = self._viewed(wanted)
        if parts is None:
            raise ValueError(
                f"{type(self).__name__}.view: argument 'shape' is {given} for {tuple(self.size())}, wanted one with "
                "the same last dimension; dequantize() first for others."
            )
        return self._alias(parts, wanted)

    def _alias(
        self, parts: dict[str, torch.Tensor | None], shape: Sequence[int], **options: Any
    ) -> "QuantizedTensorStorage":
        """Another one in the memory of this one: `parts` are its own, or views of them. options: of _like."""
        for name, part in parts.items():
            engine.of_one_version(part, getattr(self, name))
        result = self._like(parts, shape, **options)
        result._share_base(self)
        result._join(self)
        return result

    def _like(self, parts: dict[str, torch.Tensor | None], shape: Sequence[int]) -> "QuantizedTensorStorage":
        """The same class with other parts."""
        return type(self)(**self._fields(parts), fake_dtype=self._dtype)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, by default in the nominal dtype."""
        return self._dequantize(self._dtype if dtype is None else dtype)

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        self._must_hold_data("dequantize")
        if dtype not in FLOATS:
            return self._dequantize(torch.float32).to(dtype)
        return engine.dequantize(self._native(), dtype).view(self._logical_shape())

    def _must_hold_data(self, op: str) -> None:
        if not any(self.get_usages().values()):
            raise RuntimeError(
                f"{type(self).__name__}.{op}: it holds no data (cleared, or saved for backward); quantize again."
            )

    # ---- another one like it ----

    def _same_format(self, other: object) -> bool:
        return (
            isinstance(other, QuantizedTensorStorage)
            and bool(self._parts)
            and other._parts is self._parts
            and all(getattr(other, n) == getattr(self, n) for n in self._details if n != "_quantizer")
        )

    def _twin(self) -> "QuantizedTensorStorage":
        """Another one with the same parts, whose fields are independent."""
        return self._like(self._tensors(), self.size())

    def _copied(self, device: torch.device | None = None, non_blocking: bool = False) -> dict[str, torch.Tensor | None]:
        return {n: layout.copy_of(self._kind(n), t, device, non_blocking) for n, t in self._tensors().items()}

    def _empty_parts(
        self, shape: Sequence[int], device: torch.device, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        """Parts of a tensor of `shape` with the directions of this one, uninitialised."""
        specs = self._specs(tuple(shape), {name: getattr(self, name) for name in self._details})
        return {name: layout.empty_part(specs[name], device, pin_memory) for name in self._tensors()}

    def _zero(self) -> None:
        """Sets every value to 0, by scales of 1."""
        self._must_have_memory()
        for name, part in self._tensors().items():
            part.fill_(0 if self._kind(name) in DATA else 1)

    def clear(self) -> None:
        """Frees its memory, with everything else in the same buffer."""
        for name in self._parts:
            setattr(self, name, None)
        for name in self._beside_parts:
            self.__dict__.pop(name, None)

    # ---- for backward ----

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], "QuantizedTensorStorage"]:
        """(parts in their declared order, self without them)."""
        tensors = [getattr(self, name) for name in self._parts]
        self._gave = [None if t is None else (t.dtype, t.shape) for t in tensors]
        self.clear()
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Takes its parts from the front of `tensors` and returns the rest. Errors: ValueError, and nothing is changed,
        for too few, and for a part whose dtype or shape differs from the one of prepare_for_saving."""
        tensors = list(tensors)
        if len(tensors) < len(self._parts):
            raise ValueError(
                f"{type(self).__name__}.restore_from_saved: argument 'tensors' has {len(tensors)}, wanted at least the "
                f"{len(self._parts)} that prepare_for_saving gave."
            )
        gave = self.__dict__.get("_gave")
        if gave is not None and gave != [None if t is None else (t.dtype, t.shape) for t in tensors[: len(gave)]]:
            self._refuse_parts(gave, tensors)
        for name, tensor in zip(self._parts, tensors):
            setattr(self, name, tensor)
        return tensors[len(self._parts) :]

    def _refuse_parts(self, gave: list, tensors: list) -> None:
        for name, wanted, t in zip(self._parts, gave, tensors):
            got = None if t is None else (t.dtype, t.shape)
            if got != wanted:
                shown = ["None" if p is None else f"{p[0]} {list(p[1])}" for p in (got, wanted)]
                raise ValueError(
                    f"{type(self).__name__}.restore_from_saved: argument 'tensors' has {shown[0]} for {name}, wanted "
                    f"{shown[1]}: the results of prepare_for_saving, in that order."
                )

    # ---- copies and files ----

    def __deepcopy__(self, memo: dict) -> "QuantizedTensorStorage":
        memo[id(self)] = result = self._like(self._copied(), self.size()) if self._tensors() else copy.copy(self)
        result._quantizer = copy.deepcopy(self._quantizer, memo)
        return result

    def __reduce_ex__(self, protocol: int) -> tuple:
        return pickling.reduced(self)

    def __repr__(self) -> str:
        details = [f"{n.lstrip('_')}={getattr(self, n)!r}" for n in self._details if n != "_quantizer"]
        usages = [kind for kind, present in self.get_usages().items() if present]
        if not usages:
            return f"{type(self).__name__}(no data)"
        about = [f"shape={tuple(self.size())}", f"dtype={self.dtype}", *details, f"usages={usages}"]
        return f"{type(self).__name__}({', '.join(about)}, data={self._dequantize(torch.float32)})"
