"""TransformerLayer: self-attention and an MLP, each behind its norm, with residual connections."""

from collections.abc import Callable, Mapping

import torch

from transformer_engine.pytorch.attention.dot_product_attention import check_format, check_mask
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.module.base import InitMethod, check_choice, refuse
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP


class TransformerLayer(torch.nn.Module):
    """h = x + dropout(attention(norm(x))); y = h + dropout(mlp(norm(h))).

    Submodules `self_attention` and `layernorm_mlp`; the residual addition before the MLP is part of its norm.
    Shapes: [s, b, hidden] for sbhd, [b, s, hidden] for bshd.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: object | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | int | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        op = "TransformerLayer"
        check_choice(op, "layer_type", layer_type, ("encoder",), ("decoder",))
        check_mask(op, self_attn_mask_type, "self_attn_mask_type")
        check_format(op, attn_input_format, "attn_input_format")
        if not 0.0 <= hidden_dropout < 1.0:
            raise ValueError(f"{op}: argument 'hidden_dropout' is {hidden_dropout}, wanted 0 <= p < 1.")
        refuse(op, "this order of norm and residual", output_layernorm=output_layernorm)
        refuse(
            op,
            "this order of norm and residual",
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
        )
        refuse(op, "attention beside the MLP", parallel_attention_mlp=parallel_attention_mlp)
        refuse(op, "stochastic depth", drop_path_rate=drop_path_rate)
        refuse(op, "overlap of tensor-parallel communication", ub_tp_comm_overlap=ub_tp_comm_overlap)
        self.name = name
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.hidden_dropout = hidden_dropout
        self.self_attn_mask_type = self_attn_mask_type
        self.window_size = window_size
        self.get_rng_state_tracker = get_rng_state_tracker
        shared = {
            "tp_group": tp_group,
            "tp_size": tp_size,
            "params_dtype": params_dtype,
            "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "sequence_parallel": sequence_parallel,
            "set_parallel_mode": set_parallel_mode,
            "zero_centered_gamma": zero_centered_gamma,
            "normalization": normalization,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "bias": bias,
            "device": device,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            layer_number=layer_number,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            num_gqa_groups=num_gqa_groups,
            input_layernorm=True,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            rotary_pos_interleaved=rotary_pos_interleaved,
            qkv_format=attn_input_format,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            softmax_type=softmax_type,
            name=name and f"{name}.self_attention",
            **shared,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            name=name and f"{name}.layernorm_mlp",
            **shared,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """The arguments about encoders, sequence lengths and padding belong to capabilities that raise when chosen."""
        mask = self_attn_mask_type or self.self_attn_mask_type
        check_mask("TransformerLayer", mask, "self_attn_mask_type")
        refuse("TransformerLayer", "cross-attention", encoder_output=encoder_output is not None)
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=mask,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            softcap=softcap,
        )
        attended = self._dropout(attended)
        if attended.dtype == hidden_states.dtype:
            mlp, h = self.layernorm_mlp(attended, is_first_microbatch=is_first_microbatch, residual=hidden_states)
        else:  # autocast below a wider residual stream, which keeps its precision, as torch's promotion has it
            h = hidden_states + attended
            mlp = self.layernorm_mlp(h, is_first_microbatch=is_first_microbatch)
        return h + self._dropout(mlp)

    def _dropout(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, self.hidden_dropout, self.training) if self.hidden_dropout else x
