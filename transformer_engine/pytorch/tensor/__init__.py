"""Quantized tensors and the quantizers that make them. Each format has a file, which registers it (registry.py);
quantized_tensor.py, storage.py and quantizer.py hold what they share. The engine does the arithmetic."""

from importlib import import_module
from pkgutil import iter_modules

from transformer_engine.pytorch._internal.absent import names_without_a_body
from transformer_engine.pytorch.tensor import grouped_tensor as grouped_tensor
from transformer_engine.pytorch.tensor import utils as utils
from transformer_engine.pytorch.tensor.blackwell import MXFP8Quantizer as MXFP8Quantizer
from transformer_engine.pytorch.tensor.blackwell import MXFP8Tensor as MXFP8Tensor
from transformer_engine.pytorch.tensor.blackwell import MXFP8TensorStorage as MXFP8TensorStorage
from transformer_engine.pytorch.tensor.blackwell import NVFP4Quantizer as NVFP4Quantizer
from transformer_engine.pytorch.tensor.blackwell import NVFP4Tensor as NVFP4Tensor
from transformer_engine.pytorch.tensor.blackwell import NVFP4TensorStorage as NVFP4TensorStorage
from transformer_engine.pytorch.tensor.files import pack_state_dict as pack_state_dict
from transformer_engine.pytorch.tensor.files import unpack_state_dict as unpack_state_dict
from transformer_engine.pytorch.tensor.float8 import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.float8 import Float8Tensor as Float8Tensor
from transformer_engine.pytorch.tensor.float8 import Float8TensorStorage as Float8TensorStorage
from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockQuantizer as Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockwiseQTensor as Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_blockwise import (
    Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage,
)
from transformer_engine.pytorch.tensor.float8_delayed import Float8Quantizer as Float8Quantizer
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensor as HybridQuantizedTensor
from transformer_engine.pytorch.tensor.hybrid import (
    HybridQuantizedTensorStorage as HybridQuantizedTensorStorage,
)
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizer as HybridQuantizer
from transformer_engine.pytorch.tensor.identity import IdentityQuantizer as IdentityQuantizer
from transformer_engine.pytorch.tensor.identity import IdentityTensor as IdentityTensor
from transformer_engine.pytorch.tensor.identity import IdentityTensorStorage as IdentityTensorStorage
from transformer_engine.pytorch.tensor.nominal import keep_quantized_parameters
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor as QuantizedTensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer as Quantizer
from transformer_engine.pytorch.tensor.saving import prepare_for_saving as prepare_for_saving
from transformer_engine.pytorch.tensor.saving import restore_from_func_ctx as restore_from_func_ctx
from transformer_engine.pytorch.tensor.saving import restore_from_saved as restore_from_saved
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage as QuantizedTensorStorage

_GROUPED = "grouped tensors are", "keep a list of tensors"
__getattr__ = names_without_a_body(__name__, {"GroupedTensor": _GROUPED, "GroupedTensorStorage": _GROUPED})

for _file in iter_modules(__path__):  # each file registers its format
    import_module(f"{__name__}.{_file.name}")

keep_quantized_parameters()
