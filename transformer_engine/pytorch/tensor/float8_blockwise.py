"""FP8 with a scale for each 1 x 128 or 128 x 128 block. Arithmetic: transformer_engine/quantize.h."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import engine, layout
from transformer_engine.pytorch.tensor.arguments import fp8_dtype_of
from transformer_engine.pytorch.tensor.float8 import bytes_of, device_of
from transformer_engine.pytorch.tensor.layout import (
    BLOCK,
    COLUMNWISE,
    COLUMNWISE_SCALE,
    ROWWISE,
    ROWWISE_SCALE,
    PartSpec,
)
from transformer_engine.pytorch.tensor.parts import NOTHING, ColumnCopy, Part
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import Wanted
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_SCALING = {False: layout.BLOCK_1D, True: layout.BLOCK_2D}


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """value = data * the scale_inv of its block.

    _rowwise_data: uint8, of the tensor's shape. _columnwise_data: its transpose, last dimension first. With M rows (the
    leading dimensions) and K columns, float32: _rowwise_scale_inv [ceil(K / 128), roundup(M, 4)] for 1 x 128 blocks,
    [ceil(M / 128), roundup(ceil(K / 128), 4)] for 128 x 128 ones (_is_2D_scaled); _columnwise_scale_inv the same of the
    transpose."""

    _parts: ClassVar[dict[str, Part]] = {
        "_rowwise_data": Part("rowwise_data", ROWWISE),
        "_columnwise_data": Part("columnwise_data", COLUMNWISE),
        "_rowwise_scale_inv": Part("rowwise_scale_inv", ROWWISE_SCALE),
        "_columnwise_scale_inv": Part("columnwise_scale_inv", COLUMNWISE_SCALE),
    }
    _details: ClassVar[dict[str, str]] = {
        "_fp8_dtype": "fp8_dtype",
        "_is_2D_scaled": "is_2D_scaled",
        "_quantizer": "quantizer",
    }
    _gathered = ("_rowwise_data", "_rowwise_scale_inv")
    _rows_per_scale = BLOCK

    def __new__(
        cls,
        *args: Any,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | torch.dtype,
        quantizer: Quantizer | None = None,
        is_2D_scaled: bool = True,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> "Float8BlockwiseQTensorStorage":
        device = device_of(rowwise_data, columnwise_data)
        self = super().__new__(cls, *args, device=device, fake_dtype=fake_dtype, **kwargs)
        self._rowwise_data = bytes_of(cls, "rowwise_data", rowwise_data)
        self._columnwise_data = bytes_of(cls, "columnwise_data", columnwise_data)
        self._rowwise_scale_inv = rowwise_scale_inv
        self._columnwise_scale_inv = columnwise_scale_inv
        self._fp8_dtype = fp8_dtype_of(cls.__name__, fp8_dtype)
        self._is_2D_scaled = bool(is_2D_scaled)
        self._quantizer = quantizer
        return self

    @classmethod
    def _specs(cls, shape: Sequence[int], details: Mapping[str, object]) -> dict[str, PartSpec]:
        rows, cols = layout.fold(shape)
        scaling = _SCALING[bool(details["_is_2D_scaled"])]
        return {
            "_rowwise_data": PartSpec(ROWWISE, torch.uint8, tuple(shape)),
            "_columnwise_data": PartSpec(COLUMNWISE, torch.uint8, layout.transposed(shape)),
            "_rowwise_scale_inv": PartSpec(ROWWISE_SCALE, torch.float32, layout.scale_shape(scaling, rows, cols)),
            "_columnwise_scale_inv": PartSpec(COLUMNWISE_SCALE, torch.float32, layout.scale_shape(scaling, cols, rows)),
        }

    @classmethod
    def _checked_details(cls, details: Mapping[str, object]) -> dict[str, object]:
        if not isinstance(details.get("_is_2D_scaled"), bool):
            raise ValueError(f"{cls.__name__} in a file: its _is_2D_scaled is {details.get('_is_2D_scaled')!r:.100}.")
        fp8_dtype = fp8_dtype_of(f"{cls.__name__} in a file", details.get("_fp8_dtype"))
        return {"_fp8_dtype": fp8_dtype, "_is_2D_scaled": details["_is_2D_scaled"]}

    def _logical_shape(self) -> tuple[int, ...]:
        if self._rowwise_data is not None:
            return tuple(self._rowwise_data.shape)
        self._must_hold_data("size")
        return layout.untransposed(self._columnwise_data.shape)

    @classmethod
    def _parts_of(cls, native: "_C.Quantized", shape: Sequence[int]) -> dict[str, torch.Tensor | None]:
        rowwise, columnwise = native.rowwise, native.columnwise
        rows, columns = None if rowwise is None else rowwise.view(shape), None
        if columnwise is not None:
            columns = columnwise.view(layout.transposed(shape))
        return {
            "_rowwise_data": engine.of_one_version(rows, rowwise),
            "_columnwise_data": engine.of_one_version(columns, columnwise),
            "_rowwise_scale_inv": native.rowwise_scale_inv,
            "_columnwise_scale_inv": native.columnwise_scale_inv,
        }

    def _make_native(self) -> "_C.Quantized":
        self._must_hold_data("use")
        return _C.Quantized(
            _SCALING[self._is_2D_scaled],
            self._fp8_dtype is DType.kFloat8E5M2,
            engine.matrix_of(ROWWISE, self._rowwise_data),
            self._rowwise_scale_inv,
            engine.matrix_of(COLUMNWISE, self._columnwise_data),
            self._columnwise_scale_inv,
        )

    def _derivable(self) -> bool:
        return self._is_2D_scaled

    def _column_copy(self) -> ColumnCopy | None:
        if not self._is_2D_scaled or not all(self.get_usages().values()):
            return None
        down, along = (math.ceil(n / BLOCK) for n in layout.fold(self.size()))
        rows, columns = (
            layout.pitched(ROWWISE, self._rowwise_data),
            layout.pitched(COLUMNWISE, self._columnwise_data),
        )
        if rows is None or columns is None:
            return None
        return rows, columns, self._rowwise_scale_inv[:, :along], self._columnwise_scale_inv[:, :down]

    def _row_parts(self) -> tuple[str, str | None] | None:
        if self._is_2D_scaled or self._rowwise_data is None:
            return None
        return "_rowwise_data", "_rowwise_scale_inv"

    def _derive(self, kind: str, old: Mapping[str, torch.Tensor] = NOTHING) -> None:
        if not self._is_2D_scaled:
            raise NotImplementedError(
                f"{type(self).__name__}.update_usage: {kind} data of 1 x 128 blocks cannot be derived from the other "
                "direction, whose blocks run across it: quantize in both directions at once (set_usage)."
            )
        shape = tuple(self.size())
        rows, cols = (math.ceil(n / BLOCK) for n in layout.fold(shape))
        if kind == COLUMNWISE:
            data = engine.transpose(layout.matrix_of(ROWWISE, self._rowwise_data), old.get("_columnwise_data"))
            scales, before = _transposed_scales(self._rowwise_scale_inv, rows, cols), old.get("_columnwise_scale_inv")
            self._columnwise_data = data.view(layout.transposed(shape))
            self._columnwise_scale_inv = scales if before is None else before.copy_(scales)
        else:
            data = engine.transpose(layout.matrix_of(COLUMNWISE, self._columnwise_data))
            self._rowwise_data = data.view(shape)
            self._rowwise_scale_inv = _transposed_scales(self._columnwise_scale_inv, cols, rows)

    def _rows(self, start: int, stop: int) -> dict[str, torch.Tensor | None] | None:
        shape = self.size()
        if not self._is_2D_scaled or len(shape) < 2 or self._rowwise_data is None:
            return None
        rows = layout.fold(shape)[0] // max(shape[0], 1)  # of the matrix, for each index of the first dimension
        first, last, total = start * rows, stop * rows, shape[0] * rows
        if first % BLOCK or (last % BLOCK and last != total):
            return None
        blocks = slice(first // BLOCK, math.ceil(last / BLOCK))
        # Columnwise data are not a view: their scales are padded to fours in this direction.
        return {
            "_rowwise_data": self._rowwise_data[start:stop],
            "_rowwise_scale_inv": self._rowwise_scale_inv[blocks],
        }

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        if not self._is_2D_scaled:
            raise NotImplementedError(
                f"{type(self).__name__}: scales of 1 x 128 blocks are not stored row by row, so its shards cannot be "
                "gathered: shard weights of 128 x 128 blocks (block_scaling_dim=2)."
            )
        return super().fsdp_buffer_fields()

    def _default_quantizer(self) -> Quantizer:
        usages = self.get_usages()
        return Float8BlockQuantizer(self._fp8_dtype, **usages, block_scaling_dim=2 if self._is_2D_scaled else 1)


def _transposed_scales(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Scales of rows x cols blocks, for the transpose; the padding is 0."""
    result = scales.new_zeros(cols, layout.round_up(rows, layout.SCALES))
    result[:, :rows] = scales[:, :cols].t()
    return result


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """FP8 with a scale for each block. Fields: Float8BlockwiseQTensorStorage."""


class Float8BlockQuantizer(Quantizer, python_written=False):
    """FP8 by blocks: 1 x 128 along the direction that is read (block_scaling_dim=1), or 128 x 128 (2)."""

    storage_class = Float8BlockwiseQTensorStorage
    tensor_class = Float8BlockwiseQTensor
    _configuration: ClassVar[dict[str, str]] = {
        "dtype": "fp8_dtype",
        "amax_epsilon": "amax_epsilon",
        "force_pow_2_scales": "force_pow_2_scales",
        "block_scaling_dim": "block_scaling_dim",
    }
    _in_files = True
    _scalings = ("block1d", "block2d")

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        op = type(self).__name__
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"{op}: argument 'block_scaling_dim' is {block_scaling_dim!r}, wanted 1 or 2.")
        if amax_epsilon < 0:
            raise ValueError(f"{op}: argument 'amax_epsilon' is {amax_epsilon}, wanted at least 0.")
        self.dtype = fp8_dtype_of(op, fp8_dtype)
        self.block_len = BLOCK
        self.amax_epsilon = float(amax_epsilon)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.block_scaling_dim = block_scaling_dim

    @classmethod
    def _made_for(cls, wanted: Wanted) -> "Float8BlockQuantizer":
        return cls(
            wanted.fp8_dtype,
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=wanted.power_2_scale,
            amax_epsilon=wanted.amax_epsilon,
            block_scaling_dim=2 if wanted.scaling == "block2d" else 1,
        )

    _engine_fields = ("block_scaling_dim", "dtype", "force_pow_2_scales", "amax_epsilon")

    def _engine_arguments(self) -> tuple:
        kind = "block1d" if self.block_scaling_dim == 1 else "block2d"
        return kind, self.dtype is DType.kFloat8E5M2, self.force_pow_2_scales, self.amax_epsilon, None, None

    def _details(self) -> dict[str, object]:
        return {"_fp8_dtype": self.dtype, "_is_2D_scaled": self.block_scaling_dim == 2, "_quantizer": self}

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the columnwise data of a tensor of `shape`."""
        return layout.transposed(shape)

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
        """The shape of a direction's scales of a tensor of `shape`."""
        specs = self.storage_class._specs(tuple(shape), self._details())
        return specs["_columnwise_scale_inv" if columnwise else "_rowwise_scale_inv"].shape

    def _by_ranges(self) -> bool:
        return self.block_scaling_dim == 2 and not self._is_python()

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> type:
        return Float8BlockScaling
