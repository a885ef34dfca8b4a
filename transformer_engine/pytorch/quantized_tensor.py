"""The base classes of quantized tensors at the path where clients look for them."""

from transformer_engine.pytorch.tensor import QuantizedTensor as QuantizedTensor
from transformer_engine.pytorch.tensor import QuantizedTensorStorage as QuantizedTensorStorage
from transformer_engine.pytorch.tensor import Quantizer as Quantizer
from transformer_engine.pytorch.tensor import prepare_for_saving as prepare_for_saving
from transformer_engine.pytorch.tensor import restore_from_func_ctx as restore_from_func_ctx
from transformer_engine.pytorch.tensor import restore_from_saved as restore_from_saved
