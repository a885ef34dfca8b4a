"""DotProductAttention and the modules next to it, at the paths that clients import."""

from transformer_engine.pytorch.attention.dot_product_attention import context_parallel as context_parallel
from transformer_engine.pytorch.attention.dot_product_attention import utils as utils
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention as DotProductAttention,
)
