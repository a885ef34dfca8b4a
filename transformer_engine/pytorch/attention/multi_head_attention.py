"""MultiheadAttention: projections, rotary embedding, attention, output projection. Each part is a module of its own."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention, check_format, groups_of
from transformer_engine.pytorch.attention.rope import apply_rotary_to_packed
from transformer_engine.pytorch.module.base import InitMethod, check_choice, refuse
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear


class MultiheadAttention(torch.nn.Module):
    """proj(attention(rope(q), rope(k), v)) with [q | k | v] = linear(norm(x)) or linear(x).

    Submodules `layernorm_qkv` (with input_layernorm) or `qkv`, `core_attention`, `proj`; the projections have the
    parameters `query_weight`, `key_weight`, `value_weight` (and biases).
    Shapes: [s, b, hidden] for sbhd, [b, s, hidden] for bshd.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: object | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | int | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        op = "MultiheadAttention"
        check_choice(op, "attention_type", attention_type, ("self",), ("cross",))
        refuse(op, "one fused projection parameter", fuse_qkv_params=fuse_qkv_params)
        refuse(op, "a norm of queries and keys", qk_norm_type=qk_norm_type)
        check_format(op, qkv_format)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"{op}: argument 'num_attention_heads' is {num_attention_heads}, which does not divide hidden_size "
                f"{hidden_size}; pass kv_channels."
            )
        self.name = name
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups_of(op, num_attention_heads, num_gqa_groups)
        self.hidden_size_per_attention_head = kv_channels or hidden_size // num_attention_heads
        self.attention_type = attention_type
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        head = self.hidden_size_per_attention_head
        self._widths = (num_attention_heads * head, self.num_gqa_groups * head, self.num_gqa_groups * head)
        shared = {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "get_rng_state_tracker": get_rng_state_tracker,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
            "ub_overlap_ag": ub_overlap_ag,
            "ub_overlap_rs": ub_overlap_rs,
        }
        qkv = dict(
            init_method=init_method,
            parallel_mode="column" if set_parallel_mode else None,
            parameters_split=dict(zip(("query", "key", "value"), self._widths, strict=True)),
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            **shared,
        )
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                sum(self._widths),
                eps=layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                name=name and f"{name}.layernorm_qkv",
                **qkv,
            )
        else:
            self.qkv = Linear(hidden_size, sum(self._widths), name=name and f"{name}.qkv", **qkv)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            head,
            num_gqa_groups=self.num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
        )
        self.proj = Linear(
            num_attention_heads * head,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            name=name and f"{name}.proj",
            **shared,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: object | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: object | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """rotary_pos_emb: angles [s, 1, 1, d] from RotaryPositionEmbedding, or a pair of them for q and k. Returns the
        output, then proj's bias with return_bias, then the norm's output with return_layernorm_output."""
        op = "MultiheadAttention"
        refuse(op, "cross-attention", encoder_output=encoder_output is not None)
        refuse(op, "a key-value cache", inference_params=inference_params is not None)
        if hidden_states.dim() != 3:
            raise ValueError(
                f"{op}: argument 'hidden_states' has shape {tuple(hidden_states.shape)}, wanted three dimensions "
                f"({self.qkv_format[:2]}, hidden)."
            )
        norm_output = None
        if self.input_layernorm:
            qkv = self.layernorm_qkv(hidden_states, is_first_microbatch=is_first_microbatch)
            if self.return_layernorm_output:
                qkv, norm_output = qkv
        else:
            qkv = self.qkv(hidden_states, is_first_microbatch=is_first_microbatch)
        head = self.hidden_size_per_attention_head
        if rotary_pos_emb is None:
            query, key, value = (part.unflatten(-1, (-1, head)) for part in qkv.split(self._widths, dim=-1))
        else:
            query, key, value = apply_rotary_to_packed(
                qkv,
                rotary_pos_emb,
                heads=(self.num_attention_heads, self.num_gqa_groups),
                tensor_format=self.qkv_format,
                interleaved=self.rotary_pos_interleaved,
            )
        context = self.core_attention(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=attn_mask_type or self.attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            fast_zero_fill=fast_zero_fill,
            softcap=softcap,
        )
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        if not (self.return_bias or norm_output is not None):
            return projected
        results = list(projected) if self.return_bias else [projected]
        return tuple(results if norm_output is None else [*results, norm_output])
