"""FP8 with one scale for the tensor, at the path where clients look for it."""

from transformer_engine.pytorch.tensor.float8 import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.float8 import Float8Quantizer as Float8Quantizer
from transformer_engine.pytorch.tensor.float8 import Float8Tensor as Float8Tensor
from transformer_engine.pytorch.tensor.float8 import Float8TensorStorage as Float8TensorStorage
