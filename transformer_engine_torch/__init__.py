"""`import transformer_engine_torch as tex`: the names that clients import from it. The extension is
transformer_engine.pytorch._C."""

from transformer_engine.pytorch._internal.absent import names_without_a_body
from transformer_engine.pytorch.attention.partition import thd_get_partitioned_indices as thd_get_partitioned_indices
from transformer_engine.pytorch.constants import DType as DType
from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine.pytorch.optimizers import multi_tensor_adam as multi_tensor_adam
from transformer_engine.pytorch.optimizers import multi_tensor_adam_capturable as multi_tensor_adam_capturable
from transformer_engine.pytorch.optimizers import (
    multi_tensor_adam_capturable_master as multi_tensor_adam_capturable_master,
)
from transformer_engine.pytorch.optimizers import multi_tensor_adam_fp8 as multi_tensor_adam_fp8
from transformer_engine.pytorch.optimizers import multi_tensor_adam_param_remainder as multi_tensor_adam_param_remainder
from transformer_engine.pytorch.optimizers import multi_tensor_applier as multi_tensor_applier
from transformer_engine.pytorch.optimizers import (
    multi_tensor_compute_scale_and_scale_inv as multi_tensor_compute_scale_and_scale_inv,
)
from transformer_engine.pytorch.optimizers import multi_tensor_l2norm as multi_tensor_l2norm
from transformer_engine.pytorch.optimizers import multi_tensor_scale as multi_tensor_scale
from transformer_engine.pytorch.optimizers import multi_tensor_scale_tensor as multi_tensor_scale_tensor
from transformer_engine.pytorch.optimizers import multi_tensor_sgd as multi_tensor_sgd
from transformer_engine.pytorch.optimizers import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm
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
