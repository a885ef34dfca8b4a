"""Fused transformer modules for PyTorch with Transformer Engine's API: `import transformer_engine.pytorch as te`.

Importing needs no GPU, no driver and no toolkit, and initialises no CUDA."""

from transformer_engine.doctor import doctor as doctor
from transformer_engine.pytorch import _load as _load  # first: the extension, or an error that says how to mend it
from transformer_engine.pytorch import functional as functional
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention as MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding as RotaryPositionEmbedding
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch.distributed import checkpoint as checkpoint
from transformer_engine.pytorch.explain import explain as explain
from transformer_engine.pytorch.memory_plan import memory_plan as memory_plan
from transformer_engine.pytorch.module.layernorm import LayerNorm as LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP as LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear as Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as RMSNorm
from transformer_engine.pytorch.transformer import TransformerLayer as TransformerLayer
