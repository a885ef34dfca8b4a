"""MXFP8 at the path where clients look for it."""

from transformer_engine.pytorch.tensor.blackwell import MXFP8Quantizer as MXFP8Quantizer
from transformer_engine.pytorch.tensor.blackwell import MXFP8Tensor as MXFP8Tensor
from transformer_engine.pytorch.tensor.blackwell import MXFP8TensorStorage as MXFP8TensorStorage
