"""NVFP4 at the path where clients look for it."""

from transformer_engine.pytorch.tensor.blackwell import NVFP4Quantizer as NVFP4Quantizer
from transformer_engine.pytorch.tensor.blackwell import NVFP4Tensor as NVFP4Tensor
from transformer_engine.pytorch.tensor.blackwell import NVFP4TensorStorage as NVFP4TensorStorage
