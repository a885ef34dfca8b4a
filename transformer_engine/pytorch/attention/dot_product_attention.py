"""DotProductAttention on torch's scaled_dot_product_attention. Chooses layouts and the backend; computes no softmax."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from transformer_engine.pytorch.module.base import refuse

_MASKS = ("no_mask", "causal")
_LATER_MASKS = (
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
_FORMATS = ("sbhd", "bshd")

# cuDNN is the fastest on Hopper (forward + backward of a Llama-3-8B layer: 3.8 ms, flash 6.7 ms); its backward does
# not repeat its bits and it refuses to run under deterministic algorithms, where flash does and is next.
_FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_DETERMINISTIC = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def attention_backends(device: torch.device) -> list[SDPBackend] | None:
    """Backends in the order in which they are tried on a device; None leaves it to torch (the CPU)."""
    if device.type != "cuda":
        return None
    return _DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else _FASTEST


def check_mask(op: str, mask: str) -> None:
    if mask in _LATER_MASKS:
        raise NotImplementedError(
            f"{op}: argument 'attn_mask_type' is {mask!r}, which is not available in this version; "
            "use 'causal' or 'no_mask'."
        )
    if mask not in _MASKS:
        raise ValueError(f"{op}: argument 'attn_mask_type' is {mask!r}, wanted one of {_MASKS + _LATER_MASKS}.")


def check_window(op: str, mask: str, window_size: tuple[int, int] | None) -> None:
    """The windows that say no more than the mask does pass; a sliding window is refused."""
    if window_size is None or tuple(window_size) == (-1, -1):
        return
    if not (mask == "causal" and tuple(window_size) == (-1, 0)):
        raise NotImplementedError(
            f"{op}: argument 'window_size' is {tuple(window_size)}, but sliding windows are not available in this "
            "version; leave it at None."
        )


def check_format(op: str, qkv_format: str) -> None:
    if qkv_format == "thd":
        raise NotImplementedError(f"{op}: argument 'qkv_format' is 'thd', not available in this version; use 'bshd'.")
    if qkv_format not in _FORMATS:
        raise ValueError(f"{op}: argument 'qkv_format' is {qkv_format!r}, wanted 'sbhd' or 'bshd'.")


class DotProductAttention(torch.nn.Module):
    """softmax(scale * q k^T, masked) v. Shapes: q [s, b, h, d], k and v [s_kv, b, g, d] for sbhd (b first for bshd);
    the result is [s, b, h * d] (or [b, s, h * d]). h is a multiple of g: each group of h / g heads shares a k and a v.

    Determinism: torch's attention repeats its bits only under torch.use_deterministic_algorithms(True).
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: object | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: object | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        op = "DotProductAttention"
        refuse(op, "context parallelism", cp_group=cp_group)
        refuse(op, "another softmax", softmax_type="" if softmax_type == "vanilla" else softmax_type)
        refuse(op, "the maximum logit", return_max_logit=return_max_logit)
        refuse(op, "bottom-right alignment", bottom_right_diagonal=bottom_right_diagonal)
        refuse(op, "tensor parallelism", tp_size=tp_size if tp_size != 1 else 0)
        check_mask(op, attn_mask_type)
        check_window(op, attn_mask_type, window_size)
        check_format(op, qkv_format)
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"{op}: argument 'attention_dropout' is {attention_dropout}, wanted 0 <= p < 1.")
        self.name = name
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"{op}: argument 'num_gqa_groups' is {num_gqa_groups}, which does not divide "
                f"num_attention_heads {num_attention_heads}."
            )
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.softmax_scale = softmax_scale or self.hidden_size_per_attention_head_k**-0.5
        self.attention_type = attention_type
        self.layer_number = layer_number
        self.get_rng_state_tracker = get_rng_state_tracker

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: dict | None = None,
        score_mod_bprop_tensors: dict | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> torch.Tensor:
        """attention_mask, cu_seqlens and max_seqlen only matter to padding and arbitrary masks, and are not read."""
        op = "DotProductAttention"
        mask = attn_mask_type or self.attn_mask_type
        layout = qkv_format or self.qkv_format
        check_mask(op, mask)
        check_window(op, mask, window_size or self.window_size)
        check_format(op, layout)
        refuse(op, "attention bias", core_attention_bias_type=core_attention_bias_type.replace("no_bias", ""))
        refuse(op, "logit soft-capping", softcap=softcap)
        refuse(op, "a key-value cache", inference_params=inference_params is not None)
        refuse(op, "FP8", fp8_output=fp8_output)
        refuse(op, "bottom-right alignment", bottom_right_diagonal=bottom_right_diagonal)
        refuse(op, "a score modification", score_mod=score_mod is not None)
        refuse(op, "packed attention input", qkv_layer=qkv_layer is not None, kv_layer=kv_layer is not None)
        self._check_qkv(query_layer, key_layer, value_layer)
        run = partial(self._attend, layout=layout, causal=mask == "causal")
        if checkpoint_core_attention and torch.is_grad_enabled():
            return checkpoint(run, query_layer, key_layer, value_layer, use_reentrant=False)
        return run(query_layer, key_layer, value_layer)

    def _check_qkv(self, query, key, value) -> None:
        op = "DotProductAttention"
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        for name, tensor, wanted in (
            ("query_layer", query, (heads, self.hidden_size_per_attention_head_k)),
            ("key_layer", key, (groups, self.hidden_size_per_attention_head_k)),
            ("value_layer", value, (groups, self.hidden_size_per_attention_head_v)),
        ):
            if tensor is None or tensor.dim() != 4 or tuple(tensor.shape[2:]) != wanted:
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{op}: argument '{name}' has shape {got}, wanted [., ., {wanted[0]}, {wanted[1]}].")
            if tensor.dtype != query.dtype or tensor.device != query.device:
                raise ValueError(
                    f"{op}: argument '{name}' is {tensor.dtype} on {tensor.device}, wanted {query.dtype} on "
                    f"{query.device} like 'query_layer'."
                )

    def _attend(self, query, key, value, *, layout: str, causal: bool) -> torch.Tensor:
        to_bhsd = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(to_bhsd) for t in (query, key, value))
        grouped = self.num_gqa_groups != self.num_attention_heads
        if grouped and q.device.type == "cpu":  # torch's fused CPU attention takes no groups
            repeats = self.num_attention_heads // self.num_gqa_groups
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
            grouped = False
        dropout = self.attention_dropout if self.training else 0.0
        backends = attention_backends(q.device)
        chosen = nullcontext() if backends is None else sdpa_kernel(backends, set_priority=True)
        fork = nullcontext()
        if dropout > 0.0 and self.get_rng_state_tracker is not None:
            fork = self.get_rng_state_tracker().fork()
        with chosen, fork:
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=self.softmax_scale, enable_gqa=grouped
            )
        out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3))
        return out.reshape(*out.shape[:2], -1)
