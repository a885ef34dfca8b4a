"""The stacked parts of MultiheadAttention's projections, for checkpoints that load at another number of ranks."""

from collections.abc import Iterator

from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.distributed.stacked import Stack, register_stacks


@register_stacks(MultiheadAttention)
def projections(module: MultiheadAttention) -> Iterator[Stack]:
    """A fused projection, whose parts are consecutive unless it is interleaved by heads."""
    if module.qkv_weight_interleaved:
        return
    pairs = module.num_gqa_groups
    fused = {"query": module.num_attention_heads, "key": pairs, "value": pairs}
    for name, shares in (("layernorm_qkv", fused), ("qkv", fused), ("key_value", {"key": 1, "value": 1})):
        owner = getattr(module, name, None)
        if owner is not None:
            yield Stack(owner, ("weight", "bias"), shares)
