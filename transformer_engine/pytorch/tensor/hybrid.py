"""A different format for each direction, by two quantizers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.tensor.arguments import source_of
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.tensor.parts import NOTHING, Part
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two quantized tensors of the same values, one for each direction: rowwise_storage, columnwise_storage."""

    _parts: ClassVar[dict[str, Part]] = {
        "rowwise_storage": Part("rowwise_storage", "rowwise tensor"),
        "columnwise_storage": Part("columnwise_storage", "columnwise tensor"),
    }
    _details: ClassVar[dict[str, str]] = {"_quantizer": "quantizer"}

    def __new__(
        cls,
        *args: Any,
        rowwise_storage: QuantizedTensor | None,
        columnwise_storage: QuantizedTensor | None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "HybridQuantizedTensorStorage":
        storages = [t for t in (rowwise_storage, columnwise_storage) if t is not None]
        device = storages[0].device if storages else None
        self = super().__new__(cls, *args, device=device, fake_dtype=fake_dtype, **kwargs)
        self.rowwise_storage = rowwise_storage
        self.columnwise_storage = columnwise_storage
        self._quantizer = quantizer
        self._saved: list[QuantizedTensor | None] = []
        return self

    @classmethod
    def _checked_parts(cls, parts: Mapping[str, object], shape: tuple[int, ...], details: Mapping[str, object]) -> None:
        for name, t in parts.items():
            if name not in cls._parts or not isinstance(t, QuantizedTensor) or tuple(t.shape) != shape:
                raise ValueError(
                    f"{cls.__name__} in a file: its {name:.100} is a {type(t).__name__}, wanted a quantized tensor of "
                    f"shape {shape} for one of {list(cls._parts)}."
                )
        if not parts:
            raise ValueError(f"{cls.__name__} in a file: it has none of {list(cls._parts)}.")

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        return {}

    def _logical_shape(self) -> tuple[int, ...]:
        self._must_hold_data("size")
        return tuple(next(iter(self._tensors().values())).shape)

    def get_usages(self) -> dict[str, bool]:
        return {ROWWISE: self.rowwise_storage is not None, COLUMNWISE: self.columnwise_storage is not None}

    def _of_direction(self, kind: str) -> list[str]:
        return [f"{kind}_storage"]

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        found = [
            None if part is None else part.get_data_tensors(kind == ROWWISE, kind == COLUMNWISE)
            for kind, part in ((ROWWISE, self.rowwise_storage), (COLUMNWISE, self.columnwise_storage))
        ]
        return tuple(found) if rowwise_data and columnwise_data else found[0] if rowwise_data else found[1]

    def _derive(self, kind: str, old: Mapping[str, torch.Tensor] = NOTHING) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}.update_usage: {kind} data has a format of its own and cannot be derived from the "
            "other direction: quantize in both directions at once (set_usage)."
        )

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        self._must_hold_data("dequantize")
        return next(iter(self._tensors().values()))._dequantize(dtype)

    def _make_native(self) -> "_C.Quantized":
        self._must_hold_data("use")
        natives = [t._native() for t in self._tensors().values()]
        if len(natives) == 1:
            return natives[0]
        rowwise, columnwise = natives
        if (rowwise.scaling, rowwise.e5m2) != (columnwise.scaling, columnwise.e5m2):
            raise NotImplementedError(
                f"{type(self).__name__}: a product reads one format from both directions of a tensor; these are "
                f"{self.rowwise_storage!r:.80} and {self.columnwise_storage!r:.80}."
            )
        return _C.Quantized(
            rowwise.scaling,
            rowwise.e5m2,
            rowwise.rowwise,
            rowwise.rowwise_scale_inv,
            columnwise.columnwise,
            columnwise.columnwise_scale_inv,
        )

    def _is_pitched(self) -> bool:
        return all(t._is_pitched() for t in self._tensors().values())

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None] | None:
        viewed = {n: t._viewed(shape) for n, t in self._tensors().items()}
        if any(parts is None for parts in viewed.values()):
            return None
        return {n: t._alias(viewed[n], shape) for n, t in self._tensors().items()}

    def _empty_parts(
        self, shape: Sequence[int], device: torch.device, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        return {n: t._like(t._empty_parts(shape, device, pin_memory), shape) for n, t in self._tensors().items()}

    def _copied(self, device: torch.device | None = None, non_blocking: bool = False) -> dict[str, torch.Tensor]:
        return {n: t._like(t._copied(device, non_blocking), t.shape) for n, t in self._tensors().items()}

    def _zero(self) -> None:
        for t in self._tensors().values():
            t._zero()

    def _default_quantizer(self) -> Quantizer:
        rowwise = self.columnwise_storage if self.rowwise_storage is None else self.rowwise_storage
        columnwise = self.rowwise_storage if self.columnwise_storage is None else self.columnwise_storage
        return HybridQuantizer(
            rowwise_quantizer=rowwise._get_quantizer(), columnwise_quantizer=columnwise._get_quantizer()
        )

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        raise NotImplementedError(f"{type(self).__name__}: shards in two formats are not gathered; use one format.")

    def get_rowwise_subview_info(self) -> dict | None:
        return None if self.rowwise_storage is None else self.rowwise_storage.get_rowwise_subview_info()

    def get_columnwise_subview_info(self) -> dict | None:
        return None if self.columnwise_storage is None else self.columnwise_storage.get_columnwise_subview_info()

    def _restore_subviews(self, kind: str, buffer: torch.Tensor, info: Mapping) -> None:
        """By the part's own format; a part that was saved for backward is restored with it."""
        name = f"{kind}_storage"
        part = getattr(self, name)
        if part is None and self._saved:
            part = self._saved[list(self._parts).index(name)]
        if part is None:
            raise ValueError(
                f"{type(self).__name__}.restore_{kind}_subviews: it has no {name}, wanted one that was present when "
                "prepare_for_saving() took its parts."
            )
        part._restore_subviews(kind, buffer, info)
        setattr(self, name, part)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        plain: list[torch.Tensor | None] = []
        self._saved = []
        for name in self._parts:
            part = getattr(self, name)
            if part is not None:
                part = part.detach()
                tensors, part = part.prepare_for_saving()
                plain += tensors
            self._saved.append(part)
        self.clear()
        return plain, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        rest = list(tensors)
        for name, part in zip(self._parts, self._saved):
            if part is not None:
                rest = part.restore_from_saved(rest)
            setattr(self, name, part)
        self._saved = []
        return rest


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """One format for rows, another one for columns."""


_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizer(Quantizer):
    """Each direction by a quantizer of its own. columnwise_source: the input of the columnwise quantizer, the tensor or
    the rowwise quantizer's result."""

    storage_class = HybridQuantizedTensorStorage
    tensor_class = HybridQuantizedTensor

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if columnwise_source not in _SOURCES:
            raise ValueError(
                f"HybridQuantizer: argument 'columnwise_source' is {columnwise_source!r}, wanted one of {_SOURCES}."
            )
        self.rowwise_quantizer = _of_one_direction(rowwise_quantizer, "rowwise_quantizer", rowwise=True)
        self.columnwise_quantizer = _of_one_direction(columnwise_quantizer, "columnwise_quantizer", rowwise=False)
        self.columnwise_source = columnwise_source

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        x = source_of(type(self).__name__, tensor).detach()
        self._must_want_something()
        from_rows = self.columnwise_usage and self.columnwise_source != "original"
        rowwise = self.rowwise_quantizer.quantize_impl(x) if self.rowwise_usage or from_rows else None
        columnwise = None
        if self.columnwise_usage:
            columnwise = self.columnwise_quantizer.quantize_impl(rowwise.dequantize() if from_rows else x)
        parts = {"rowwise_storage": rowwise if self.rowwise_usage else None, "columnwise_storage": columnwise}
        return self._from_parts(parts, x.shape, x.dtype)

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensorStorage:
        x = source_of(type(self).__name__, src).detach()
        self._must_fit(x, dst)
        dst._must_be_writable()
        if dst.rowwise_storage is not None:
            self.rowwise_quantizer.update_quantized(x, dst.rowwise_storage, noop_flag=noop_flag)
        if dst.columnwise_storage is not None:
            if self.columnwise_source != "original":
                rowwise = dst.rowwise_storage
                x = (self.rowwise_quantizer.quantize_impl(x) if rowwise is None else rowwise).dequantize()
            self.columnwise_quantizer.update_quantized(x, dst.columnwise_storage, noop_flag=noop_flag)
        dst._written()
        return dst

    def _empty_parts(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> dict[str, Any]:
        self._must_want_something()
        options = {"dtype": dtype, "device": device, "pin_memory": pin_memory}
        rowwise = self.rowwise_quantizer.make_empty(shape, **options) if self.rowwise_usage else None
        columnwise = self.columnwise_quantizer.make_empty(shape, **options) if self.columnwise_usage else None
        return {"rowwise_storage": rowwise, "columnwise_storage": columnwise}

    def calibrate(self, tensor: torch.Tensor) -> None:
        self.rowwise_quantizer.calibrate(tensor)
        self.columnwise_quantizer.calibrate(tensor)

    def copy(self) -> "HybridQuantizer":
        result = super().copy()
        result.rowwise_quantizer = self.rowwise_quantizer.copy()
        result.columnwise_quantizer = self.columnwise_quantizer.copy()
        return result

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def is_requantization_safe(self) -> bool:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return all(quantizer.is_requantization_safe() for quantizer in parts)

    def _makes_the_same(self, other: Quantizer | None, tensor: QuantizedTensorStorage) -> bool:
        if not super()._makes_the_same(other, tensor):
            return False
        usages = ("rowwise", "columnwise")
        named = ((getattr(self, f"{d}_quantizer"), getattr(tensor, f"{d}_storage")) for d in usages)
        return all(part is None or own._makes_the_same(part._quantizer, part) for own, part in named)

    def _plain(self) -> dict[str, object]:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return super()._plain() | {"parts": str([quantizer._plain() for quantizer in parts])}


def _of_one_direction(quantizer: object, argument: str, rowwise: bool) -> Quantizer:
    """A copy of `quantizer` for that direction alone."""
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"HybridQuantizer: argument '{argument}' is a {type(quantizer).__name__}, wanted a Quantizer.")
    result = quantizer.copy()
    result.internal = False
    result.set_usage(rowwise=rowwise, columnwise=not rowwise)
    return result
