"""The names of quantization.py at the place where older clients look for them."""

from transformer_engine.pytorch.quantization import FP8GlobalStateManager as FP8GlobalStateManager
from transformer_engine.pytorch.quantization import autocast as autocast
from transformer_engine.pytorch.quantization import check_fp8_support as check_fp8_support
from transformer_engine.pytorch.quantization import check_mxfp8_support as check_mxfp8_support
from transformer_engine.pytorch.quantization import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.quantization import fp8_model_init as fp8_model_init
from transformer_engine.pytorch.quantization import get_default_recipe as get_default_recipe
from transformer_engine.pytorch.quantization import quantized_model_init as quantized_model_init
