"""`import transformer_engine_torch as tex`: what clients take from there, and nothing else. The extension itself is
transformer_engine.pytorch's own."""

from transformer_engine.pytorch._absent import names_without_a_body
from transformer_engine.pytorch.attention.partition import thd_get_partitioned_indices as thd_get_partitioned_indices
from transformer_engine.pytorch.constants import DType as DType
from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine_torch.functions import ACTIVATIONS
from transformer_engine_torch.functions import FP8TensorMeta as FP8TensorMeta
from transformer_engine_torch.functions import clamped_dswiglu as clamped_dswiglu
from transformer_engine_torch.functions import clamped_swiglu as clamped_swiglu
from transformer_engine_torch.functions import dequantize as dequantize
from transformer_engine_torch.functions import quantize as quantize

FP8FwdTensors, FP8BwdTensors = FP8FwdTensorIdx, FP8BwdTensorIdx
globals().update(ACTIVATIONS)

__getattr__ = names_without_a_body(
    __name__,
    {
        "*": (
            "the rest of this interface is",
            "use transformer_engine.pytorch, whose te.functional holds the operations",
        )
    },
)
