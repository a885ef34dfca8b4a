"""Element types, indices of a module's tensors, block sizes and the values of modules' arguments, by the numbers and
names of the API."""

from enum import IntEnum

import torch


class DType(IntEnum):
    """Element types."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}

TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}

# Columns of scales and amax histories: each product's tensors in turn, of the forward and of the backward.
_FORWARD = [f"GEMM{product}_{tensor}" for product in (1, 2, 3) for tensor in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{tensor}{product}" for product in (1, 2, 3) for tensor in ("OUTPUT", "INPUT")]
FP8FwdTensorIdx = IntEnum("FP8FwdTensorIdx", _FORWARD, start=0, module=__name__)
FP8BwdTensorIdx = IntEnum("FP8BwdTensorIdx", _BACKWARD, start=0, module=__name__)

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

# The possible values of modules' arguments.
AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
AttnTypes = ("self", "cross")
AttnBiasTypes = ("pre_scale_bias", "post_scale_bias", "no_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)
dist_group_type = torch.distributed.ProcessGroup  # for annotations
