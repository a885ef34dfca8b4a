"""The questions to a CustomRecipe's factory and its answers: plain data, nothing is quantized here."""

from collections.abc import Callable
from dataclasses import dataclass

from transformer_engine.common.recipe import DelayedScaling, Format


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for. module_type: 'linear'. tensor_type: 'input', 'weight' or 'output' of a
    product, 'grad_output' or 'grad_input' of its backward. name: of the module, followed by a point and the product if
    the module has several ('mlp.fc1'); '' for a module without one."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class QuantizerRequest:
    """A factory's answer that leaves the quantizer and its state to the library."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling for this tensor; fields as DelayedScaling's. All requests of one module have the same values."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        self.recipe()  # checks the values

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(
            margin=self.margin,
            fp8_format=self.fp8_format,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            scaling_factor_compute_algo=self.scaling_factor_compute_algo,
            reduce_amax=self.reduce_amax,
        )
