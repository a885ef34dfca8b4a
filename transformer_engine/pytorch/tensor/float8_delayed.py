"""FP8 by a given scale, which its owner computes from earlier amaxes: delayed scaling. float8.py has the tensor;
quantization/delayed.py updates the scales."""

from typing import Any, ClassVar

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import engine
from transformer_engine.pytorch.tensor.float8 import Float8TensorStorage, PerTensorQuantizer
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import Wanted
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


class Float8Quantizer(PerTensorQuantizer, python_written=False):
    """FP8 by a given scale: delayed scaling. Every tensor that it quantizes raises `amax` to the tensor's own.

    scale, amax: float32 [1]. For a module's quantizer they are views of its scales and history, looked up again if
    these have moved."""

    _configuration: ClassVar[dict[str, str]] = {"dtype": "fp8_dtype"}
    _scalings = ("delayed",)
    _column: Any = None  # in a module's scaling state (quantization.delayed.Column)

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32 or value.numel() != 1:
                raise ValueError(
                    f"{type(self).__name__}: argument '{name}' is {value!r}, wanted a float32 tensor of one element."
                )
        self._scale: torch.Tensor | None = scale
        self._amax: torch.Tensor | None = amax

    @classmethod
    def _made_for(cls, wanted: Wanted) -> "Float8Quantizer":
        """The quantizer of a module's tensor; without a column it serves comparisons only."""
        column = wanted.column
        if column is None:
            return cls(torch.ones(1), torch.zeros(1), wanted.fp8_dtype)
        result = cls(column.scale, column.amax, wanted.fp8_dtype)
        result._column, result._scale, result._amax = column, None, None
        return result

    @property
    def scale(self) -> torch.Tensor:
        return self._column.scale if self._scale is None else self._scale

    @scale.setter
    def scale(self, value: torch.Tensor) -> None:
        self._scale = value

    @property
    def amax(self) -> torch.Tensor:
        return self._column.amax if self._amax is None else self._amax

    @amax.setter
    def amax(self, value: torch.Tensor) -> None:
        self._amax = value

    def _engine_arguments(self) -> tuple:
        return "delayed", self.dtype is DType.kFloat8E5M2, False, 0.0, self.scale, self.amax

    def _adopting(self, wanted: Quantizer) -> Quantizer:
        own, new = self._column, wanted._column
        same = own is not None and own.state is new.state and own.index == new.index
        return self if same else wanted

    # ---- of a weight that exists in FP8 alone ----

    def _weight_state(self, device: torch.device) -> Any:
        """The state of its module's scales, on `device`; None if it is not such a weight's quantizer."""
        column = self._column
        if column is None or not column.held or device.type == "meta":
            return None
        if column.state.scale.device != device:
            column.state.move(device)
        return column.state

    def _put_in(self, x: torch.Tensor, noop: torch.Tensor | None = None) -> None:
        """Until the history has a step, values bring their scale; afterwards the recipe computes it."""
        state = self._weight_state(x.device)
        if state is not None and not state.stepped:
            state.fit(self._column.index, engine.amax(x), noop)

    def _range_state(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        self._weight_state(device)
        return {"scale": self.scale, "amax": self.amax}

    def _fit_range(self, amaxes: torch.Tensor) -> None:
        state = self._weight_state(amaxes.device)
        if state is not None and not state.stepped:
            state.fit(self._column.index, amaxes)

    def _held(self, values: torch.Tensor) -> QuantizedTensorStorage:
        self._put_in(values)
        return super()._held(values)

    def _write(self, x: torch.Tensor, dst: QuantizedTensorStorage, noop_flag: torch.Tensor | None = None) -> None:
        self._put_in(x, noop_flag)
        super()._write(x, dst, noop_flag)

    def _values_to_come(self) -> None:
        if self._column is not None and self._column.held:
            self._column.state.forget(self._column.index)

    def _took(self, tensor: Float8TensorStorage) -> None:
        state = self._weight_state(tensor.device)
        if state is None:
            return
        amax = _amax_of(tensor)
        if not state.stepped:
            state.fit(self._column.index, amax)
        state.cover(self._column.index, amax)

    def _adopted(self, tensor: Float8TensorStorage) -> None:
        state = self._weight_state(tensor.device)
        if state is not None:
            state.cover_unknown(self._column.index, _amax_of(tensor))

    def calibrate(self, tensor: torch.Tensor) -> None:
        self._take_note_of(engine.amax(tensor))

    def _get_compatible_recipe(self) -> type:
        return DelayedScaling


def _amax_of(tensor: "Float8TensorStorage") -> torch.Tensor:
    """float32 [1]: the largest of its finite values."""
    data = tensor._data if tensor._data is not None else tensor._transpose
    if not data.numel():
        return torch.zeros_like(tensor._scale_inv)
    fp8 = torch.float8_e5m2 if tensor._fp8_dtype is DType.kFloat8E5M2 else torch.float8_e4m3fn
    largest = torch.tensor(torch.finfo(fp8).max, dtype=fp8).view(torch.uint8).item()
    magnitude = data & 0x7F
    found = torch.where(magnitude > largest, 0, magnitude).amax().view(1)
    return found.view(fp8).float() * tensor._scale_inv
