"""A format's declaration: its parts, their shapes, and their conversion from and to the engine; and the attributes that
follow from it. No part is written here, and no value computed."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import in_a_mode
from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE, PartSpec

NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})
# Rowwise and columnwise data as matrices that products read; views of their scales, one the transpose of the other,
# unless one scale serves both.
ColumnCopy = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Part(NamedTuple):
    """A field that holds a tensor: the constructor's argument for it, and its kind."""

    argument: str
    kind: str


class Parts:
    """The part of a quantized storage that describes its parts."""

    _parts: ClassVar[dict[str, Part]] = {}  # in the order of prepare_for_saving
    _details: ClassVar[dict[str, str]] = {}  # other fields: the constructor's argument for each

    # ---- the questions that a format answers ----

    @classmethod
    def _specs(cls, shape: Sequence[int], details: dict[str, object]) -> dict[str, PartSpec]:
        """The spec of each part of a tensor of `shape`."""
        raise NotImplementedError(f"{cls.__name__} does not define its parts (_specs).")

    def _logical_shape(self) -> tuple[int, ...]:
        """The tensor's shape, computed from the parts."""
        raise NotImplementedError(f"{type(self).__name__} does not define its shape (_logical_shape).")

    @classmethod
    def _parts_of(cls, native: "_C.Quantized", shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
        """The parts of a tensor of `shape` that the engine made."""
        raise NotImplementedError(f"{cls.__name__} is not made by the engine.")

    def _make_native(self) -> "_C.Quantized":
        raise NotImplementedError(f"{type(self).__name__} has no form that the engine reads.")

    def _derive(self, kind: str, old: Mapping[str, torch.Tensor] = NOTHING) -> None:
        """Derives the missing direction from the present one, or raises with the reason. old: earlier columnwise parts,
        whose memory the new ones use."""
        raise NotImplementedError(f"{type(self).__name__}: {kind} data cannot be derived from the other direction.")

    def _derivable(self) -> bool:
        """Whether one direction can be derived from the other."""
        return False

    def _column_copy(self) -> ColumnCopy | None:
        """If the columnwise direction can be derived into its own memory by a transpose: what that reads and writes."""
        return None

    def _row_parts(self) -> tuple[str, str | None] | None:
        """If rows can be moved without new scales: the name of the rowwise data, and of the scales of single rows."""
        return None

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        """The fields of _details except the quantizer, from a file: raises ValueError for invalid values."""
        raise ValueError(f"{cls.__name__} in a file: it is not stored in files.")

    @classmethod
    def _checked_parts(cls, parts: Mapping[str, object], shape: tuple[int, ...], details: Mapping[str, object]) -> None:
        """Raises ValueError for parts of a file that no tensor of `shape` can have."""
        op, specs = f"{cls.__name__} in a file", cls._specs(shape, details)
        for name, t in parts.items():
            if name not in specs:
                raise ValueError(f"{op}: it has a part {name!r:.100}, wanted {list(specs)}.")
            wanted = specs[name].dtype, tuple(specs[name].shape)
            got = (t.dtype, tuple(t.shape)) if type(t) is torch.Tensor else type(t).__name__
            if got != wanted:
                raise ValueError(f"{op}: its {name} is {got}, wanted {wanted}.")
        data = [name for name in parts if specs[name].kind in DATA]
        for name in data:
            scales = [n for n, s in specs.items() if s.kind in ("scale", f"{specs[name].kind} scale")]
            missing = [n for n in scales if n not in parts]
            if missing:
                raise ValueError(f"{op}: it has {name} without {missing}.")
        if not data:
            raise ValueError(f"{op}: it has none of {[n for n, s in specs.items() if s.kind in DATA]}.")

    def _default_quantizer(self) -> Any:
        """Quantizes new values if no quantizer came with the tensor."""
        raise NotImplementedError(
            f"{type(self).__name__}: it has no quantizer, so that no new values can be put in it; a class of your own "
            "has to define quantize_."
        )

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None] | None:
        """The parts of a view of `shape`; None if they would need another layout."""
        same_rows = shape and self._logical_shape() and shape[-1] == self._logical_shape()[-1]
        if not same_rows:
            return None
        reshape = {ROWWISE: tuple(shape), COLUMNWISE: layout.transposed(shape)}
        parts = self._tensors()
        try:
            return {n: t.view(reshape[self._kind(n)]) if self._kind(n) in DATA else t for n, t in parts.items()}
        except RuntimeError:
            return None

    def _rows(self, start: int, stop: int) -> dict[str, torch.Tensor | None] | None:
        """The parts of rows [start, stop) of the first dimension, as views; None if there are no such views."""
        return None

    # ---- its fields ----

    @classmethod
    def _kind(cls, name: str) -> str:
        return cls._parts[name].kind

    @classmethod
    def _names(cls, kind: str) -> list[str]:
        return [name for name, part in cls._parts.items() if part.kind == kind]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parts that are present."""
        return {n: t for n in self._parts if (t := getattr(self, n)) is not None}

    def _fields(self, parts: dict[str, torch.Tensor | None]) -> dict[str, object]:
        """Arguments that construct this format from `parts`, with this tensor's other fields."""
        arguments = {part.argument: parts.get(name) for name, part in self._parts.items()}
        return arguments | {argument: getattr(self, name) for name, argument in self._details.items()}

    def _native(self) -> "_C.Quantized":
        """The engine's handle, in the same memory: modules pass it on. Kept while the parts stay, unless one of them
        had to be copied because its rows do not start on 16 bytes, or may belong to a tracer."""
        handle = self.__dict__.get("_handle")
        if handle is None:
            handle = self._make_native()
            if self._is_pitched() and not in_a_mode():
                self.__dict__["_handle"] = handle
        return handle

    def _is_pitched(self) -> bool:
        parts = self._tensors()
        return all(layout.pitched(self._kind(n), t) is not None for n, t in parts.items() if self._kind(n) in DATA)

    def get_metadata(self) -> dict[str, object]:
        """The constructor's arguments for this data."""
        return self._fields(self._tensors()) | {"fake_dtype": self._dtype}

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """(rowwise, columnwise) data, or the requested one."""
        found = [getattr(self, self._names(kind)[0]) for kind in DATA]
        if rowwise_data and columnwise_data:
            return tuple(found)
        if not (rowwise_data or columnwise_data):
            raise ValueError("get_data_tensors: rowwise_data and columnwise_data are False, wanted at least one True.")
        return found[0] if rowwise_data else found[1]

    def get_usages(self) -> dict[str, bool]:
        """Which directions are present."""
        return {kind: any(getattr(self, n) is not None for n in self._names(kind)) for kind in DATA}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Derives a direction that is requested (True) and missing, then drops one that is not (False); None:
        unchanged. Errors: NotImplementedError if a direction cannot be derived from the other, RuntimeError if there is
        none."""
        wanted = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        usages = self.get_usages()
        for kind in DATA:
            if wanted[kind] and not usages[kind]:
                if not any(usages.values()):
                    raise RuntimeError(f"{type(self).__name__}: {kind} data is wanted, but it holds no data at all.")
                self._derive(kind)
        for kind in DATA:
            if wanted[kind] is False:
                for name in self._of_direction(kind):
                    setattr(self, name, None)

    def _of_direction(self, kind: str) -> list[str]:
        """Names of the parts that only this direction needs."""
        return self._names(kind) + self._names(f"{kind} scale")
