"""Two formats, one a direction, at the path where clients look for them."""

from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensor as HybridQuantizedTensor
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensorStorage as HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizer as HybridQuantizer
