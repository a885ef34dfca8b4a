"""What every quantized tensor is made of, with or without torch.Tensor's behaviour. A format declares its parts and
answers a few questions; saving, copying, flattening, pickling and sharding follow from the declaration, here."""

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor import engine, layout
from transformer_engine.pytorch.tensor.aliases import Aliases
from transformer_engine.pytorch.tensor.fields import MarkField, PartField
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE, PartSpec
from transformer_engine.pytorch.tensor.rows import Rows
from transformer_engine.pytorch.tensor.sharding import Sharding
from transformer_engine.pytorch.tensor.subviews import Subviews

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})

# Class name -> class, of every format: how a file finds it again.
FORMATS: dict[str, type] = {}


class Part(NamedTuple):
    """A field that holds a tensor: the constructor's argument for it, and what it is."""

    argument: str
    kind: str


class QuantizedTensorStorage(Subviews, Sharding, Rows, Aliases):
    """The data of a quantized tensor and the scales that turn it into values."""

    _parts: ClassVar[dict[str, Part]] = {}  # in the order of prepare_for_saving
    _details: ClassVar[dict[str, str]] = {}  # other fields: the constructor's argument for each
    _TE_do_not_offload = MarkField()
    _quantizer: Any = None  # what quantizes new values
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
    _keeps_columnwise = False  # somebody else has its memory too: a captured graph, FSDP2

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

    # ---- what a format answers ----

    @classmethod
    def _specs(cls, shape: Sequence[int], details: dict[str, object]) -> dict[str, PartSpec]:
        """What each part of a tensor of `shape` is."""
        raise NotImplementedError(f"{cls.__name__} does not say what its parts are (_specs).")

    def _logical_shape(self) -> tuple[int, ...]:
        """The tensor's shape, told from the parts."""
        raise NotImplementedError(f"{type(self).__name__} does not tell its shape (_logical_shape).")

    @classmethod
    def _parts_of(cls, native: "_C.Quantized", shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
        """The parts of a tensor of `shape` that the engine made."""
        raise NotImplementedError(f"{cls.__name__} is not made by the engine.")

    def _make_native(self) -> "_C.Quantized":
        raise NotImplementedError(f"{type(self).__name__} has no form that the engine reads.")

    def _derive(self, kind: str, old: Mapping[str, torch.Tensor] = NOTHING) -> None:
        """Makes the missing direction from the one that is there, or raises with the reason. old: columnwise parts of
        before, in whose memory the new ones are made."""
        raise NotImplementedError(f"{type(self).__name__}: {kind} data cannot be made from the other direction.")

    def _derivable(self) -> bool:
        """Whether one direction can be made of the other."""
        return False

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        """Fields of _details but for the quantizer, as a file has them: raises ValueError for what they cannot be."""
        raise ValueError(f"{cls.__name__} in a file: it is not kept in files.")

    @classmethod
    def _checked_parts(cls, parts: Mapping[str, object], shape: tuple[int, ...], details: Mapping[str, object]) -> None:
        """Raises ValueError for parts that a file has and that no tensor of `shape` can have."""
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
        """What quantizes new values where no quantizer came with the tensor."""
        raise NotImplementedError(
            f"{type(self).__name__}: it has no quantizer, so that no new values can be put in it; a class of your own "
            "has to define quantize_."
        )

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None] | None:
        """The parts of a view of `shape`; None where they would have to be laid out anew."""
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
        """The parts of rows [start, stop) of the first dimension, as views; None where there are no such views."""
        return None

    # ---- its fields ----

    @classmethod
    def _kind(cls, name: str) -> str:
        return cls._parts[name].kind

    @classmethod
    def _names(cls, kind: str) -> list[str]:
        return [name for name, part in cls._parts.items() if part.kind == kind]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The parts that are there."""
        return {n: t for n in self._parts if (t := getattr(self, n)) is not None}

    def _fields(self, parts: dict[str, torch.Tensor | None]) -> dict[str, object]:
        """Arguments that construct this format from `parts`, with everything else as it is here."""
        arguments = {part.argument: parts.get(name) for name, part in self._parts.items()}
        return arguments | {argument: getattr(self, name) for name, argument in self._details.items()}

    def _native(self) -> "_C.Quantized":
        """The engine's handle, of the same memory: what modules pass on. Kept while the parts stay, unless one of them
        had to be copied because its rows do not start on 16 bytes."""
        handle = self.__dict__.get("_handle")
        if handle is None:
            handle = self._make_native()
            if self._is_pitched():
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
        """(rowwise, columnwise) data, or the one that is asked for."""
        found = [getattr(self, self._names(kind)[0]) for kind in DATA]
        if rowwise_data and columnwise_data:
            return tuple(found)
        if not (rowwise_data or columnwise_data):
            raise ValueError("get_data_tensors: rowwise_data and columnwise_data are False, wanted at least one True.")
        return found[0] if rowwise_data else found[1]

    def get_usages(self) -> dict[str, bool]:
        """Which directions are there."""
        return {kind: any(getattr(self, n) is not None for n in self._names(kind)) for kind in DATA}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Makes a direction that is wanted (True) and missing, then drops one that is not (False); None: as it is.
        Errors: NotImplementedError where a direction cannot be made from the other one, RuntimeError where none is."""
        wanted = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        there = self.get_usages()
        for kind in DATA:
            if wanted[kind] and not there[kind]:
                if not any(there.values()):
                    raise RuntimeError(f"{type(self).__name__}: {kind} data is wanted, but it holds no data at all.")
                self._derive(kind)
        for kind in DATA:
            if wanted[kind] is False:
                for name in self._of_direction(kind):
                    setattr(self, name, None)

    def _of_direction(self, kind: str) -> list[str]:
        """Names of the parts that nothing but this direction needs."""
        return self._names(kind) + self._names(f"{kind} scale")

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
        raise RuntimeError(f"{type(self).__name__}: it holds no data (cleared, or saved for backward).")

    @property
    def dtype(self) -> torch.dtype:
        """The nominal one: of the values, not of the data."""
        return self._dtype

    def numel(self) -> int:
        return self.size().numel()

    def view(self, *shape: int | Sequence[int]) -> "QuantizedTensorStorage":
        """Shares memory. Errors: ValueError where the data would have to be laid out anew."""
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
        """Another one on the memory of this one: `parts` are its own, or views of them. options: of _like."""
        for name, part in parts.items():
            engine.of_one_version(part, getattr(self, name))
        result = self._like(parts, shape, **options)
        result._share_whole(self)
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
            raise RuntimeError(f"{type(self).__name__}.{op}: it holds no data (cleared, or saved for backward).")

    # ---- new values ----

    def _must_be_writable(self) -> None:
        self._must_have_memory()
        self._must_reach_aliases()

    def _must_have_memory(self) -> None:
        for part in self._tensors().values():
            layout.must_have_memory(part)

    def _get_quantizer(self) -> Any:
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> "QuantizedTensorStorage":
        """Takes tensor's values, quantized as this one is. noop_flag: float32 [1]; unless it is 0, nothing is done."""
        if isinstance(tensor, QuantizedTensorStorage):
            if noop_flag is None and self.copy_from_storage(tensor):
                return self
            tensor = tensor.dequantize()
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> bool:
        """Takes src's bytes and scales, in the directions that this one has. False, and nothing is done, where src is
        of another format."""
        if not self._same_format(src):
            return False
        if tuple(src.size()) != tuple(self.size()):
            raise ValueError(
                f"{type(self).__name__}.copy_from_storage: argument 'src' has shape {tuple(src.size())}, wanted "
                f"{tuple(self.size())}."
            )
        for kind, there in self.get_usages().items():
            if there and not src.get_usages()[kind]:
                src = src._twin()
                src.update_usage(**{f"{kind}_usage": True})
        if self._rows_of is not None:
            self._write_quantized_rows(src)
            return True
        self._must_be_writable()
        src._must_have_memory()
        with torch.no_grad():
            for name, own in self._tensors().items():
                own.copy_(getattr(src, name))
        self._written()
        self._took()
        return True

    def _take(self, parts: dict[str, torch.Tensor | None], noop_flag: torch.Tensor | None = None) -> None:
        """Copies `parts` into its own, unless noop_flag holds anything but 0."""
        with torch.no_grad():
            for name, own in self._tensors().items():
                given = parts[name]
                own.copy_(given if noop_flag is None else torch.where(noop_flag == 0, given, own))

    def _written(self) -> None:
        """Every direction that it has holds new values. Called behind each write, whoever made it."""
        self._count_write()
        self._reach_aliases()

    def _count_write(self) -> None:
        """A backward that saved the parts must notice, and inside of __torch_dispatch__ torch tells nobody."""
        torch.autograd.graph.increment_version(self._tensors().values())

    def _values_to_come(self) -> None:
        """It is about to be filled with values that have nothing to do with those that it has."""
        if self._quantizer is not None:
            self._quantizer._values_to_come()

    def _took(self) -> None:
        """It holds data now that somebody else has quantized."""
        if self._quantizer is not None:
            self._quantizer._took(self)

    def _same_format(self, other: object) -> bool:
        return (
            isinstance(other, QuantizedTensorStorage)
            and bool(self._parts)
            and other._parts is self._parts
            and all(getattr(other, n) == getattr(self, n) for n in self._details if n != "_quantizer")
        )

    def _twin(self) -> "QuantizedTensorStorage":
        """Another one with the same parts: what happens to its fields does not happen to these."""
        return self._like(self._tensors(), self.size())

    def _copied(self, device: torch.device | None = None, non_blocking: bool = False) -> dict[str, torch.Tensor | None]:
        return {n: layout.copy_of(self._kind(n), t, device, non_blocking) for n, t in self._tensors().items()}

    def _empty_parts(
        self, shape: Sequence[int], device: torch.device, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        """Parts of a tensor of `shape` with the directions of this one, not initialised."""
        specs = self._specs(tuple(shape), {name: getattr(self, name) for name in self._details})
        return {name: layout.empty_part(specs[name], device, pin_memory) for name in self._tensors()}

    def _zero(self) -> None:
        """Sets every value to 0, by scales of 1."""
        self._must_have_memory()
        for name, part in self._tensors().items():
            part.fill_(0 if self._kind(name) in DATA else 1)

    def clear(self) -> None:
        """Lets go of the memory, and of what lies in the same buffer beside the parts."""
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
        """Takes its parts from the front of `tensors`; the rest. Errors: ValueError, and nothing is changed, for too
        few, and for a part that is not of the dtype and shape of what prepare_for_saving gave there."""
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
                    f"{shown[1]}: what prepare_for_saving gave, in that order."
                )

    # ---- copies and files ----

    def __deepcopy__(self, memo: dict) -> "QuantizedTensorStorage":
        memo[id(self)] = result = self._like(self._copied(), self.size()) if self._tensors() else copy.copy(self)
        result._quantizer = copy.deepcopy(self._quantizer, memo)
        return result

    def __reduce_ex__(self, protocol: int) -> tuple:
        from transformer_engine.pytorch.tensor import pickling  # which needs this class

        return pickling.reduced(self)

    def __repr__(self) -> str:
        details = [f"{n.lstrip('_')}={getattr(self, n)!r}" for n in self._details if n != "_quantizer"]
        usages = [kind for kind, there in self.get_usages().items() if there]
        if not usages:
            return f"{type(self).__name__}(no data)"
        about = [f"shape={tuple(self.size())}", f"dtype={self.dtype}", *details, f"usages={usages}"]
        return f"{type(self).__name__}({', '.join(about)}, data={self._dequantize(torch.float32)})"
