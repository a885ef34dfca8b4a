"""Functional form of each op. Eager calls the extension directly; under torch.compile the same call becomes
torch.ops.te.<op>, the same C++ function with a schema. Besides, only tensor/engine.py, which quantizes tensors,
chooses between the two."""

from transformer_engine.pytorch.functional.activation import activation, activation_kinds, scaled_activation
from transformer_engine.pytorch.functional.attention import attention
from transformer_engine.pytorch.functional.comm import comm_interleave, comm_ordered_sum
from transformer_engine.pytorch.functional.cross_entropy import cross_entropy, fused_linear_cross_entropy
from transformer_engine.pytorch.functional.gemm import gemm, gemm_accumulate
from transformer_engine.pytorch.functional.grouped_linear import grouped_linear, grouped_offsets
from transformer_engine.pytorch.functional.grouped_mlp import grouped_mlp
from transformer_engine.pytorch.functional.linear import (
    activation_linear,
    layernorm_mlp,
    linear,
    noop_cat,
    normalization_linear,
)
from transformer_engine.pytorch.functional.normalization import normalization
from transformer_engine.pytorch.functional.offload import offload_pack, offload_packed_bytes, offload_unpack
from transformer_engine.pytorch.functional.optimizer import (
    optimizer_adam,
    optimizer_compute_scales,
    optimizer_count_step,
    optimizer_l2norm,
    optimizer_scale,
    optimizer_sgd,
)
from transformer_engine.pytorch.functional.permute import (
    permute,
    permute_chunk_map,
    permute_gather,
    permute_mask_map,
    permute_routing,
    permute_row_map,
    unpermute,
)
from transformer_engine.pytorch.functional.quantize import (
    dequantize,
    quantize,
    quantize_range_amax,
    quantize_range_cast,
)
from transformer_engine.pytorch.functional.rope import rope, rope_qkv
from transformer_engine.pytorch.functional.router import (
    router_aux_loss,
    router_logits,
    router_rows,
    router_scores,
    router_topk,
)

__all__ = [
    "activation",
    "activation_kinds",
    "activation_linear",
    "attention",
    "comm_interleave",
    "comm_ordered_sum",
    "cross_entropy",
    "dequantize",
    "fused_linear_cross_entropy",
    "gemm",
    "gemm_accumulate",
    "grouped_linear",
    "grouped_mlp",
    "grouped_offsets",
    "layernorm_mlp",
    "linear",
    "noop_cat",
    "normalization",
    "normalization_linear",
    "offload_pack",
    "offload_packed_bytes",
    "offload_unpack",
    "optimizer_adam",
    "optimizer_compute_scales",
    "optimizer_count_step",
    "optimizer_l2norm",
    "optimizer_scale",
    "optimizer_sgd",
    "permute",
    "permute_chunk_map",
    "permute_gather",
    "permute_mask_map",
    "permute_routing",
    "permute_row_map",
    "quantize",
    "quantize_range_amax",
    "quantize_range_cast",
    "rope",
    "rope_qkv",
    "router_aux_loss",
    "router_logits",
    "router_rows",
    "router_scores",
    "router_topk",
    "scaled_activation",
    "unpermute",
]
