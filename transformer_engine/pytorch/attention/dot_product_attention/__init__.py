"""DotProductAttention at the path where clients look for it."""

from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention as DotProductAttention,
)
