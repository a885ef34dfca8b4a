"""DotProductAttention on torch's scaled_dot_product_attention. Chooses layouts and the backend; computes no softmax."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, check_choice, refuse

_MASKS = ("no_mask", "causal")
_LATER_MASKS = (
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
_LATER_BIASES = ("pre_scale_bias", "post_scale_bias", "alibi")

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


def check_mask(op: str, mask: str, argument: str = "attn_mask_type") -> None:
    check_choice(op, argument, mask, _MASKS, _LATER_MASKS)


def check_window(op: str, mask: str, window_size: tuple[int, int] | None) -> None:
    """The windows that say no more than the mask does pass; a sliding window is refused."""
    if window_size is None or tuple(window_size) == (-1, -1):
        return
    if not (mask == "causal" and tuple(window_size) == (-1, 0)):
        raise NotImplementedError(
            f"{op}: argument 'window_size' is {tuple(window_size)}, but sliding windows are not available in this "
            "version; leave it at None."
        )


def check_format(op: str, qkv_format: str, argument: str = "qkv_format") -> None:
    check_choice(op, argument, qkv_format, ("sbhd", "bshd"), ("thd",))


def groups_of(op: str, heads: int, groups: int | None) -> int:
    """The number of key and value heads; each is shared by heads / groups query heads."""
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ValueError(
            f"{op}: argument 'num_gqa_groups' is {groups}, wanted a divisor of num_attention_heads {heads}."
        )
    return groups


class _Replay:
    """Inside, the tracker is in the states of an earlier time: a second run drops what the first one dropped."""

    def __init__(self, tracker) -> None:
        self.tracker, self.then = tracker, tracker.get_states()

    def __enter__(self) -> None:
        self.now = self.tracker.get_states()
        self.tracker.set_states(self.then)

    def __exit__(self, *_) -> None:
        self.tracker.set_states(self.now)


class DotProductAttention(TransformerEngineBaseModule):
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
        check_choice(op, "softmax_type", softmax_type, ("vanilla",), ("off-by-one", "learnable"))
        check_choice(op, "attention_type", attention_type, ("self", "cross"))
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
        self.num_gqa_groups = groups_of(op, num_attention_heads, num_gqa_groups)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.softmax_scale = self.hidden_size_per_attention_head_k**-0.5 if softmax_scale is None else softmax_scale
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
        check_choice(op, "core_attention_bias_type", core_attention_bias_type, ("no_bias",), _LATER_BIASES)
        refuse(op, "logit soft-capping", softcap=softcap)
        refuse(op, "a key-value cache", inference_params=inference_params is not None)
        refuse(op, "FP8", fp8_output=fp8_output)
        refuse(op, "bottom-right alignment", bottom_right_diagonal=bottom_right_diagonal)
        refuse(op, "a score modification", score_mod=score_mod is not None)
        refuse(op, "packed attention input", qkv_layer=qkv_layer is not None, kv_layer=kv_layer is not None)
        self._check_qkv(query_layer, key_layer, value_layer, layout)
        run = partial(self._attend, layout=layout, causal=mask == "causal")
        if checkpoint_core_attention and torch.is_grad_enabled():
            contexts = {}
            if self._forks():  # torch's checkpoint restores the default random state itself
                replay = _Replay(self.get_rng_state_tracker())
                contexts["context_fn"] = lambda: (nullcontext(), replay)
            return checkpoint(run, query_layer, key_layer, value_layer, use_reentrant=False, **contexts)
        return run(query_layer, key_layer, value_layer)

    def _forks(self) -> bool:
        return self.training and self.attention_dropout > 0.0 and self.get_rng_state_tracker is not None

    def _check_qkv(self, query, key, value, layout: str) -> None:
        op = "DotProductAttention"
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        batch_dim = 1 if layout == "sbhd" else 0
        for name, tensor, wanted in (
            ("query_layer", query, (heads, self.hidden_size_per_attention_head_k)),
            ("key_layer", key, (groups, self.hidden_size_per_attention_head_k)),
            ("value_layer", value, (groups, self.hidden_size_per_attention_head_v)),
        ):
            if tensor is None or tensor.dim() != 4 or tuple(tensor.shape[2:]) != wanted:
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{op}: argument '{name}' has shape {got}, wanted [., ., {wanted[0]}, {wanted[1]}].")
            if not tensor.is_floating_point():
                raise ValueError(f"{op}: argument '{name}' is {tensor.dtype}, wanted float32, float16 or bfloat16.")
            mixed = tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type)
            if mixed or tensor.device != query.device:
                raise ValueError(
                    f"{op}: argument '{name}' is {tensor.dtype} on {tensor.device}, wanted {query.dtype} on "
                    f"{query.device} like 'query_layer'."
                )
            if tensor.shape[batch_dim] != query.shape[batch_dim]:
                raise ValueError(
                    f"{op}: argument '{name}' has shape {tuple(tensor.shape)} in {layout}, wanted the batch size "
                    f"{query.shape[batch_dim]} of 'query_layer'."
                )
        if value.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"{op}: argument 'value_layer' has shape {tuple(value.shape)}, wanted the sequence length of "
                f"'key_layer', {tuple(key.shape)}."
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
        fork = self.get_rng_state_tracker().fork() if self._forks() else nullcontext()
        with chosen, fork:
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=self.softmax_scale, enable_gqa=grouped
            )
        return out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)
