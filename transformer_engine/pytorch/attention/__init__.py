"""Attention: rotary embeddings, DotProductAttention on kernels of PyTorch and of this library, MultiheadAttention. The
names that clients import from here."""

from transformer_engine.pytorch.attention import stacked as stacked
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.attention.inference import InferenceParams as InferenceParams
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention as MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding as RotaryPositionEmbedding
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb as apply_fused_qkv_rotary_pos_emb
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb as apply_rotary_pos_emb
