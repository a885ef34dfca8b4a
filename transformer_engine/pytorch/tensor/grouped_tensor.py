"""GroupedTensor at the path where clients import it without a guard. Not available in this version."""

from transformer_engine.pytorch._internal.absent import absent
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_GROUPED = "grouped tensors are", "keep a list of tensors"


@absent(*_GROUPED)
class GroupedTensorStorage(QuantizedTensorStorage):
    """Several quantized tensors in one memory."""


@absent(*_GROUPED)
class GroupedTensor(QuantizedTensor):
    """The same, as a tensor."""
