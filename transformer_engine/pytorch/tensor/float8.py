"""FP8 with one scale for the whole tensor: Float8Tensor, and the quantizer that computes the scale from the tensor's
own amax (current scaling). float8_delayed.py has the one with a given scale. Arithmetic:
transformer_engine/quantize.h."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import engine, layout
from transformer_engine.pytorch.tensor.arguments import fp8_dtype_of
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, ROWWISE, PartSpec
from transformer_engine.pytorch.tensor.parts import NOTHING, ColumnCopy, Part
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import Wanted
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


def device_of(*parts: torch.Tensor | None) -> torch.device | None:
    return next((t.device for t in parts if t is not None), None)


def bytes_of(cls: type, argument: str, data: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 data as bytes."""
    if data is None or data.dtype is torch.uint8:
        return data
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return data.view(torch.uint8)
    raise ValueError(f"{cls.__name__}: argument '{argument}' is {data.dtype}, wanted uint8.")


class Float8TensorStorage(QuantizedTensorStorage):
    """value = data * scale_inv.

    _data: uint8, of the tensor's shape. _transpose: the same bytes, last dimension first; invalid while
    _transpose_invalid is set. _scale_inv: float32 [1]. If the pitch of data exceeds its rows, the rest holds zeros."""

    _parts: ClassVar[dict[str, Part]] = {
        "_data": Part("data", ROWWISE),
        "_transpose": Part("data_transpose", COLUMNWISE),
        "_scale_inv": Part("fp8_scale_inv", "scale"),
    }
    _details: ClassVar[dict[str, str]] = {"_fp8_dtype": "fp8_dtype", "_quantizer": "quantizer"}
    _gathered = ("_data",)

    def __new__(
        cls,
        *args: Any,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | torch.dtype,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "Float8TensorStorage":
        device = device_of(data, data_transpose, fp8_scale_inv)
        self = super().__new__(cls, *args, device=device, fake_dtype=fake_dtype, **kwargs)
        self._data = bytes_of(cls, "data", data)
        self._transpose = bytes_of(cls, "data_transpose", data_transpose)
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype_of(cls.__name__, fp8_dtype)
        self._quantizer = quantizer
        self._transpose_invalid = data_transpose is None
        return self

    @classmethod
    def _specs(cls, shape: Sequence[int], details: Mapping[str, object]) -> dict[str, PartSpec]:
        return {
            "_data": PartSpec(ROWWISE, torch.uint8, tuple(shape)),
            "_transpose": PartSpec(COLUMNWISE, torch.uint8, layout.transposed(shape)),
            "_scale_inv": PartSpec("scale", torch.float32, (1,)),
        }

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        return {"_fp8_dtype": fp8_dtype_of(f"{cls.__name__} in a file", details.get("_fp8_dtype"))}

    def _logical_shape(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        self._must_hold_data("size")
        return layout.untransposed(self._transpose.shape)

    @classmethod
    def _parts_of(cls, native: "_C.Quantized", shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
        rowwise, columnwise = native.rowwise, native.columnwise
        scale_inv = native.columnwise_scale_inv if rowwise is None else native.rowwise_scale_inv
        parts = {
            "_data": None if rowwise is None else rowwise.view(shape),
            "_transpose": None if columnwise is None else columnwise.view(layout.transposed(shape)),
            "_scale_inv": scale_inv.as_strided((1,), (1,)),  # the engine stores the scale itself after it
        }
        for part, source in zip(parts.values(), (rowwise, columnwise, scale_inv)):
            engine.of_one_version(part, source)
        return parts

    def _make_native(self) -> "_C.Quantized":
        self._must_hold_data("use")
        rowwise = engine.matrix_of(ROWWISE, self._data)
        columnwise = engine.matrix_of(COLUMNWISE, self._transpose if self.get_usages()[COLUMNWISE] else None)
        return _C.Quantized(
            layout.TENSOR,
            self._fp8_dtype is DType.kFloat8E5M2,
            rowwise,
            None if rowwise is None else self._scale_inv,
            columnwise,
            None if columnwise is None else self._scale_inv,
        )

    def get_usages(self) -> dict[str, bool]:
        return {
            ROWWISE: self._data is not None,
            COLUMNWISE: self._transpose is not None and not self._transpose_invalid,
        }

    def _derivable(self) -> bool:
        return True

    def _column_copy(self) -> ColumnCopy | None:
        if not all(self.get_usages().values()):
            return None
        rows, columns = layout.pitched(ROWWISE, self._data), layout.pitched(COLUMNWISE, self._transpose)
        return None if rows is None or columns is None else (rows, columns, None, None)

    def _row_parts(self) -> tuple[str, str | None] | None:
        return None if self._data is None else ("_data", None)

    def _derive(self, kind: str, old: Mapping[str, torch.Tensor] = NOTHING) -> None:
        shape = tuple(self.size())
        if kind == COLUMNWISE:
            transpose = engine.transpose(layout.matrix_of(ROWWISE, self._data), old.get("_transpose"))
            self._transpose = None  # an invalid one: others may share it
            self._transpose, self._transpose_invalid = transpose.view(layout.transposed(shape)), False
        else:
            self._data = engine.transpose(layout.matrix_of(COLUMNWISE, self._transpose)).view(shape)

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        rest = super().restore_from_saved(tensors)
        self._transpose_invalid = self._transpose is None
        return rest

    def _tensors(self) -> dict[str, torch.Tensor]:
        parts = super()._tensors()
        if self._transpose_invalid:  # it is neither copied, shared nor written
            parts.pop("_transpose", None)
        return parts

    def _restored(self, kind: str) -> None:
        if kind == COLUMNWISE:
            self._transpose_invalid = self._transpose is None

    def _create_transpose(self) -> None:
        """Derives the columnwise data from the rowwise data."""
        self._transpose_invalid = True
        self.update_usage(columnwise_usage=True)

    def _reset_caches(self) -> None:
        """For callers that write _data: the columnwise data are no longer its transpose."""
        self._transpose_invalid = True
        self._handle = None
        self._reach_aliases()

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor | None] | None:
        parts = super()._viewed(shape)
        if parts is None and self._data is not None and self._data.is_contiguous():  # a transpose has no such view
            return {"_data": self._data.view(shape), "_scale_inv": self._scale_inv}
        return parts

    def _rows(self, start: int, stop: int) -> dict[str, torch.Tensor | None] | None:
        along = 1 if len(self.size()) > 1 else 0  # of the transpose, whose first dimension is the last one
        usages, count = self.get_usages(), stop - start
        return {
            "_data": self._data[start:stop] if usages[ROWWISE] else None,
            "_transpose": self._transpose.narrow(along, start, count) if usages[COLUMNWISE] else None,
            "_scale_inv": self._scale_inv,
        }

    def _by_scale(self, values: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        """Bytes of `values` in this format, by the given scale."""
        scale = scale_inv.reciprocal().clamp_(max=torch.finfo(torch.float32).max)
        e5m2 = self._fp8_dtype is DType.kFloat8E5M2
        quantizer = _C.Quantizer("delayed", e5m2, False, 0.0, scale, torch.zeros_like(scale))
        return engine.quantize(quantizer, values, rowwise=True, columnwise=False).rowwise

    def _default_quantizer(self) -> Quantizer:
        return Float8CurrentScalingQuantizer(self._fp8_dtype, self.device, columnwise=self._transpose is not None)

    def _before_sharding(self, group: Any) -> None:
        quantizer = self._quantizer
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.with_amax_reduction:
            # one scale for the whole tensor: its shards must agree on it whenever they get new values
            self._quantizer = quantizer.copy()
            self._quantizer.with_amax_reduction = True
            self._quantizer.amax_reduction_group = group


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """FP8 with one scale. Fields: Float8TensorStorage."""


class PerTensorQuantizer(Quantizer, python_written=False):
    """The common part of both kinds of scaling."""

    storage_class = Float8TensorStorage
    tensor_class = Float8Tensor

    def __init__(self, fp8_dtype: DType | torch.dtype, *, rowwise: bool, columnwise: bool) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype_of(type(self).__name__, fp8_dtype)

    def _details(self) -> dict[str, object]:
        return {"_fp8_dtype": self.dtype, "_quantizer": self}

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def _by_ranges(self) -> bool:
        return not self._is_python()

    def _recording(self, amax: torch.Tensor) -> Quantizer:
        result = self.copy()
        result.amax = amax
        return result

    def _take_note_of(self, amax: torch.Tensor) -> None:
        if self.amax is not None:
            with torch.no_grad():
                self.amax.copy_(torch.fmax(self.amax, amax.view_as(self.amax)))


class Float8CurrentScalingQuantizer(PerTensorQuantizer, python_written=False):
    """FP8 by the tensor's own amax.

    use_existing_amax: `amax` holds it already. with_amax_reduction: the largest amax of the group's ranks counts, and
    all of its ranks must quantize at the same time."""

    _configuration: ClassVar[dict[str, str]] = {
        "dtype": "fp8_dtype",
        "force_pow_2_scales": "force_pow_2_scales",
        "amax_epsilon": "amax_epsilon",
    }
    _in_files = True
    _scalings = ("current",)
    _shared_by_copies = ("amax_reduction_group",)

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        device: torch.device | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if amax_epsilon < 0:
            raise ValueError(f"{type(self).__name__}: argument 'amax_epsilon' is {amax_epsilon}, wanted at least 0.")
        if use_existing_amax and amax is None:
            raise ValueError(
                f"{type(self).__name__}: argument 'amax' is None with use_existing_amax=True, wanted a tensor of "
                "one float."
            )
        self.device = device
        self.use_existing_amax = use_existing_amax
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = float(amax_epsilon)
        self.scale = scale
        self.amax = amax

    @classmethod
    def _made_for(cls, wanted: Wanted) -> "Float8CurrentScalingQuantizer":
        settings = {"force_pow_2_scales": wanted.power_2_scale, "amax_epsilon": wanted.amax_epsilon}
        return cls(wanted.fp8_dtype, wanted.device, **settings)

    def _is_python(self) -> bool:
        return super()._is_python() or self.with_amax_reduction or self.use_existing_amax or self.scale is not None

    _engine_fields = ("dtype", "use_existing_amax", "amax", "force_pow_2_scales", "amax_epsilon")

    def _engine_arguments(self) -> tuple:
        amax = None if self.use_existing_amax else self.amax
        return "current", self.dtype is DType.kFloat8E5M2, self.force_pow_2_scales, self.amax_epsilon, None, amax

    def _quantize_by_engine(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        noop: torch.Tensor | None = None,
        out: "_C.Quantized | None" = None,
    ) -> "_C.Quantized":
        amax = self.amax if self.use_existing_amax else None
        if self.with_amax_reduction:
            amax = engine.amax(x) if amax is None else amax.clone()
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group)
        native = engine.quantize(self._built_in(), x, rowwise, columnwise, noop, out, amax)
        if self.scale is not None:
            scales = (native.rowwise_scale_inv if rowwise else native.columnwise_scale_inv).view(-1)
            self.scale.copy_((scales[1:] if scales.numel() > 1 else 1 / scales).view_as(self.scale))
        return native

    def _range_state(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        return {"amax": self.amax}

    def is_requantization_safe(self) -> bool:
        return not self.use_existing_amax

    def _rebuildable(self) -> bool:
        return super()._rebuildable() and not self.use_existing_amax

    def _get_compatible_recipe(self) -> type:
        return Float8CurrentScaling
