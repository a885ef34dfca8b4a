"""FP8 with a scale for each block, at the path where clients look for it."""

from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockQuantizer as Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockwiseQTensor as Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.float8_blockwise import (
    Float8BlockwiseQTensorStorage as Float8BlockwiseQTensorStorage,
)
