"""The format without quantization: unchanged values with the interface of a quantized tensor."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch.tensor.arguments import source_of
from transformer_engine.pytorch.tensor.layout import DATA, PartSpec
from transformer_engine.pytorch.tensor.parts import Part
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import FLOATS
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


class IdentityTensorStorage(QuantizedTensorStorage):
    """Unchanged values, _hp_data, which serve both directions."""

    _parts: ClassVar[dict[str, Part]] = {"_hp_data": Part("hp_data", "values")}
    _details: ClassVar[dict[str, str]] = {"_quantizer": "quantizer"}
    _gathered = ("_hp_data",)

    def __new__(
        cls,
        *args: Any,
        hp_data: torch.Tensor | None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "IdentityTensorStorage":
        device = None if hp_data is None else hp_data.device
        self = super().__new__(cls, *args, device=device, fake_dtype=fake_dtype, **kwargs)
        self._hp_data = hp_data
        self._quantizer = quantizer
        return self

    @classmethod
    def _specs(cls, shape: Sequence[int], details: Mapping[str, object]) -> dict[str, PartSpec]:
        quantizer = details.get("_quantizer")
        dtype = torch.float32 if quantizer is None or quantizer.dtype is None else quantizer.dtype
        return {"_hp_data": PartSpec("values", dtype, tuple(shape))}

    @classmethod
    def _checked_parts(cls, parts: Mapping[str, object], shape: tuple[int, ...], details: Mapping[str, object]) -> None:
        data = parts.get("_hp_data")
        if set(parts) != {"_hp_data"} or type(data) is not torch.Tensor or data.dtype not in FLOATS:
            raise ValueError(f"{cls.__name__} in a file: it has {list(parts)}, wanted float values _hp_data.")
        if tuple(data.shape) != shape:
            raise ValueError(f"{cls.__name__} in a file: its _hp_data is {tuple(data.shape)}, wanted {shape}.")

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        return {}

    def _logical_shape(self) -> tuple[int, ...]:
        self._must_hold_data("size")
        return tuple(self._hp_data.shape)

    def get_usages(self) -> dict[str, bool]:
        return dict.fromkeys(DATA, self._hp_data is not None)

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        return (self._hp_data, self._hp_data) if rowwise_data and columnwise_data else self._hp_data

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if rowwise_usage is False and columnwise_usage is False:
            self.clear()

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        self._must_hold_data("dequantize")
        return self._hp_data.to(dtype)

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None] | None:
        return {"_hp_data": self._hp_data.view(shape)} if self._hp_data.is_contiguous() else None

    def _rows(self, start: int, stop: int) -> dict[str, torch.Tensor | None] | None:
        return {"_hp_data": self._hp_data[start:stop]}

    def _empty_parts(
        self, shape: Sequence[int], device: torch.device, pin_memory: bool = False
    ) -> dict[str, torch.Tensor]:
        return {"_hp_data": torch.empty(shape, dtype=self._hp_data.dtype, device=device, pin_memory=pin_memory)}

    def _subview_specs(self, kind: str, shape: Sequence[int]) -> dict[str, PartSpec]:
        specs = super()._subview_specs(kind, shape)
        dtype = getattr(self._quantizer, "dtype", None) or self._dtype
        return specs | {"_hp_data": specs["_hp_data"]._replace(dtype=dtype)}

    def _zero(self) -> None:
        self._hp_data.zero_()

    def _default_quantizer(self) -> Quantizer:
        return IdentityQuantizer(dtype=self._hp_data.dtype)


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """Unchanged values."""


class IdentityQuantizer(Quantizer, python_written=False):
    """No quantization: its tensors hold their input, in `dtype` if that is set; otherwise they share the memory of the
    input."""

    storage_class = IdentityTensorStorage
    tensor_class = IdentityTensor

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"IdentityQuantizer: argument 'dtype' is {dtype}, wanted float32, float16 or bfloat16.")
        self.dtype = dtype

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        x = source_of(type(self).__name__, tensor).detach()
        return self._from_parts({"_hp_data": x if self.dtype is None else x.to(self.dtype)}, x.shape, x.dtype)

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensorStorage:
        x = source_of(type(self).__name__, src).detach()
        self._must_fit(x, dst)
        dst._take({"_hp_data": x}, noop_flag)
        dst._written()
        return dst

    def _empty_parts(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> dict[str, Any]:
        return {"_hp_data": torch.empty(shape, dtype=self.dtype or dtype, device=device, pin_memory=pin_memory)}

    def multi_quantize(self, tensors: Sequence[torch.Tensor]) -> list[QuantizedTensorStorage]:
        return [self.quantize_impl(t) for t in tensors]

    def _engine_arguments(self) -> tuple:
        return "none", False, False, 0.0, None, None

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def is_requantization_safe(self) -> bool:
        return True
