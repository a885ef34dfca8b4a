"""Key-value caches for inference, and the fused MLA projection: names for clients. Not available in this version."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch._internal.absent import absent


@absent("the key-value cache is", "attend without inference_params")
class InferenceParams:
    """Keys and values of the earlier tokens."""

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Callable | None = None,
    ) -> None: ...


@absent("the paged key-value cache is", "attend without inference_params")
class PagedKVCacheManager:
    """Keys and values of the earlier tokens, in pages."""


@absent("the fused MLA projection, which needs Blackwell, is", "use Linear and apply_rotary_pos_emb")
class FusedMLAQUpProjRopeQuant(torch.nn.Module):
    """Up-projection of MLA's queries, rotation and quantization in one."""
