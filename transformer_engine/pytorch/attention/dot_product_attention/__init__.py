"""DotProductAttention at the path where clients look for it, and the modules that they look for beside it."""

from transformer_engine.pytorch.attention.dot_product_attention import context_parallel as context_parallel
from transformer_engine.pytorch.attention.dot_product_attention import utils as utils
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention as DotProductAttention,
)
