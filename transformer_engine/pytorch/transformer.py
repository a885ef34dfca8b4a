"""TransformerLayer: attention (one or two) and an MLP, each after its norm, with residual connections. It calls the
parts and adds; the parts compute."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch._internal.keywords import OF_ATTENTION, check_keywords
from transformer_engine.pytorch._internal.torch_autocast import to_autocast
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import check_format
from transformer_engine.pytorch.attention.masks import AttentionMask, Window, check_mask, check_window
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.attention.packed import check_packed_mask
from transformer_engine.pytorch.attention.tokens import TokenSizes
from transformer_engine.pytorch.constants import LayerTypes
from transformer_engine.pytorch.distributed.rng import CudaRNGStatesTracker
from transformer_engine.pytorch.module.base import InitMethod, check_choice, refuse
from transformer_engine.pytorch.module.composite import Composite
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.parallel import check_options, group_size
from transformer_engine.pytorch.module.rmsnorm import RMSNorm
from transformer_engine.pytorch.module.submodules import is_own, run_part


def _check_rate(op: str, argument: str, rate: float) -> None:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{op}: argument '{argument}' is {rate}, wanted 0 <= p <= 1.")


def _check_fused(op: str, fuse_wgrad_accumulation: bool, fuse_qkv_params: bool) -> None:
    if fuse_wgrad_accumulation and not fuse_qkv_params:
        raise ValueError(
            f"{op}: argument 'fuse_wgrad_accumulation' is True and 'fuse_qkv_params' False: gradients accumulate into "
            "one main_grad for the projections; wanted fuse_qkv_params=True."
        )


def _check_parallel_mlp(op: str, layer_type: str, post_layernorm: bool, output_layernorm: bool) -> None:
    for name, excluded in (
        ("layer_type", layer_type == "decoder" and layer_type),
        ("apply_residual_connection_post_layernorm", post_layernorm),
        ("output_layernorm", output_layernorm),
    ):
        if excluded:
            raise ValueError(
                f"{op}: argument 'parallel_attention_mlp' is True and '{name}' is {excluded!r}, which exclude each "
                "other; leave one of them at its default."
            )


def _check_divided(op: str, ranks: int, set_parallel_mode: bool) -> None:
    if ranks > 1 and not set_parallel_mode:
        raise ValueError(
            f"{op}: argument 'set_parallel_mode' is False, but the layer is divided over {ranks} ranks (tp_size or "
            "tp_group), whose parts must be added up before the residual is; wanted True."
        )


class TransformerLayer(Composite):
    """h = x + drop(attention(norm(x))); y = h + drop(mlp(norm(h))).

    drop: hidden_dropout of elements, then drop_path_rate of whole sequences of the batch, both in training alone.
    layer_type 'decoder': between the two h = h + drop(cross_attention(norm(h), encoder_output)).
    parallel_attention_mlp: y = x + drop(attention(norm(x)) + mlp(norm'(x))).
    apply_residual_connection_post_layernorm: each sum takes norm's output in place of its input.
    output_layernorm: no norm before the (self-)attention, one after the last sum.
    Submodules `self_attention`, `inter_attention` (decoder), `layernorm_mlp`, `layernorm` (output_layernorm). The
    residual addition before the MLP is part of its norm.
    Shapes: [s, b, hidden] for sbhd, [b, s, hidden] for bshd, [t, hidden] or [t, 1, hidden] for thd (packed sequences).

    set_parallel_mode with tp_size or a tp_group: attention and MLP are divided over its ranks, like MultiheadAttention
    and LayerNormMLP, and with sequence_parallel dimension 0 of hidden_states and encoder_output too. Then hidden_states
    must have the length seq_length, if that is given: a rank's part of it if it is dimension 0.
    Dropout of divided tensors must differ from rank to rank: hidden_dropout's under sequence_parallel, the attention's
    without it, is drawn inside get_rng_state_tracker().fork(). Under sequence_parallel callers may fork around the
    whole layer, and must for the attention's dropout. Trackers of clients may not support nested forks: with one that
    is not a CudaRNGStatesTracker the layer leaves forking to the caller.
    tp_recompute_allgather, tp_overlap (extensions of the common API): as Linear's; ub_tp_comm_overlap means "auto".
    """

    @check_keywords(retired=OF_ATTENTION)
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
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Window = None,
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
        *,
        recompute_norm_output: bool = False,
        tp_recompute_allgather: bool = True,
        tp_overlap: str = "auto",
    ) -> None:
        super().__init__()
        op = "TransformerLayer"
        check_choice(op, "layer_type", layer_type, LayerTypes)
        check_mask(op, self_attn_mask_type, "self_attn_mask_type")
        check_mask(op, enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        check_window(op, window_size)
        check_window(op, enc_dec_window_size, "enc_dec_window_size")
        check_format(op, attn_input_format, "attn_input_format")
        _check_rate(op, "hidden_dropout", hidden_dropout)
        _check_rate(op, "drop_path_rate", drop_path_rate)
        if attn_input_format == "thd":
            refuse(op, "the drop of whole sequences in thd", drop_path_rate=drop_path_rate)
        _check_fused(op, fuse_wgrad_accumulation, fuse_qkv_params)
        if parallel_attention_mlp:
            _check_parallel_mlp(op, layer_type, apply_residual_connection_post_layernorm, output_layernorm)
        check_options(op, tp_overlap=tp_overlap, tp_recompute_allgather=tp_recompute_allgather)
        self.tp_size = group_size(op, tp_group, tp_size)
        self.tp_group = tp_group
        _check_divided(op, self.tp_size, set_parallel_mode)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.name, self.hidden_size = name, hidden_size
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.self_attn_mask_type = self_attn_mask_type
        self.window_size = window_size
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.enc_dec_window_size = enc_dec_window_size
        self.attn_input_format = attn_input_format
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.get_rng_state_tracker = get_rng_state_tracker
        self._tokens = self._token_sizes(seq_length, micro_batch_size)
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
            "recompute_norm_output": recompute_norm_output,
            "tp_recompute_allgather": tp_recompute_allgather,
            "tp_overlap": tp_overlap,
        }
        attention = {
            "num_attention_heads": num_attention_heads,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            **shared,
        }
        self._add_attention(bottom_right_diagonal, enc_dec_bottom_right_diagonal, attention)
        self._add_mlp(ffn_hidden_size, layernorm_epsilon, activation, activation_params, shared)
        if output_layernorm:
            self._add_output_norm(layernorm_epsilon, **shared)

    def _token_sizes(self, seq_length: int | None, micro_batch_size: int | None) -> TokenSizes:
        return TokenSizes(
            "TransformerLayer",
            self.attn_input_format,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            ranks=self.tp_size,
            divides=self.tp_size if self.sequence_parallel else 1,
        )

    def _add_attention(
        self, bottom_right_diagonal: bool | None, enc_dec_bottom_right_diagonal: bool | None, options: dict[str, object]
    ) -> None:
        """The self-attention, and a decoder's cross-attention. options: of both."""

        def add(submodule: str, attention_type: str, input_layernorm: bool, **mask: object) -> None:
            attention = MultiheadAttention(
                self.hidden_size,
                attention_type=attention_type,
                input_layernorm=input_layernorm,
                return_layernorm_output=self.apply_residual_connection_post_layernorm and input_layernorm,
                layer_number=self.layer_number,
                qkv_format=self.attn_input_format,
                name=self.name and f"{self.name}.{submodule}",
                **mask,
                **options,
            )
            self.add_module(submodule, attention)

        add(
            "self_attention",
            "self",
            not self.output_layernorm,
            attn_mask_type=self.self_attn_mask_type,
            window_size=self.window_size,
            bottom_right_diagonal=bottom_right_diagonal,
        )
        if self.layer_type == "decoder":
            add(
                "inter_attention",
                "cross",
                True,
                attn_mask_type=self.enc_dec_attn_mask_type,
                window_size=self.enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
            )

    def _add_mlp(
        self,
        ffn_hidden_size: int,
        eps: float,
        activation: str,
        activation_params: Mapping[str, float] | None,
        options: dict[str, object],
    ) -> None:
        self.layernorm_mlp = LayerNormMLP(
            self.hidden_size,
            ffn_hidden_size,
            eps,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            name=self.name and f"{self.name}.layernorm_mlp",
            **options,
        )

    def _add_output_norm(
        self,
        eps: float,
        *,
        normalization: str,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        device: torch.device | str | int | None,
        **_: object,
    ) -> None:
        self.layernorm = (RMSNorm if normalization == "RMSNorm" else LayerNorm)(
            self.hidden_size,
            eps,
            sequence_parallel=self.sequence_parallel,
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask = None,
        self_attn_mask_type: str | None = None,
        window_size: Window = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: AttentionMask = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window = None,
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
        """Masks, windows, lengths and biases as in DotProductAttention. A decoder's cross-attention takes the enc_dec_
        arguments, and the same rotary embedding and bias as its self-attention; cu_seqlens_kv are its encoder's
        lengths."""
        op = "TransformerLayer"
        if type(hidden_states) is not torch.Tensor:
            check_tensor(op, "hidden_states", hidden_states)
        self._tokens.check_length(op, hidden_states)
        mask = self_attn_mask_type or self.self_attn_mask_type
        cross_mask = enc_dec_attn_mask_type or self.enc_dec_attn_mask_type
        self._check_masks(mask, cross_mask)
        check_window(op, window_size)
        check_window(op, enc_dec_window_size, "enc_dec_window_size")
        decoder = self.layer_type == "decoder"
        if decoder != (encoder_output is not None):
            got, wanted = ("None", "a tensor") if decoder else ("given", "None")
            raise ValueError(
                f"{op}: argument 'encoder_output' is {got}, wanted {wanted}, as layer_type is {self.layer_type!r}."
            )
        shared = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "softcap": softcap,
        }
        hidden_states = to_autocast(hidden_states)  # the residual stream too
        # The residual branch reads the input that the attention's norm returns: both gradients meet in its backward.
        norm = self.apply_residual_connection_post_layernorm
        joins = is_own(self.self_attention, MultiheadAttention) and self.self_attention.input_layernorm
        joins = joins and not (norm or self.parallel_attention_mlp)
        attended, residual = self._run_part(
            "self_attention",
            hidden_states,
            attention_mask,
            ours={"return_input": True} if joins else None,
            norm=norm and not self.output_layernorm,
            attn_mask_type=mask,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q if decoder else cu_seqlens_kv,
            max_seqlen_kv=max_seqlen_q if decoder else max_seqlen_kv,
            **self._padded(cu_seqlens_q_padded, cu_seqlens_q_padded if decoder else cu_seqlens_kv_padded),
            **shared,
        )
        if self.parallel_attention_mlp:
            mlp, _ = self._run_part("layernorm_mlp", hidden_states, is_first_microbatch=is_first_microbatch)
            return hidden_states + self._drop(attended + mlp)
        attended = self._drop(attended)
        if decoder:
            hidden = residual + attended
            attended, residual = self._run_part(
                "inter_attention",
                hidden,
                enc_dec_attn_mask,
                encoder_output,
                norm=norm,
                attn_mask_type=cross_mask,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_kv=cu_seqlens_kv,
                max_seqlen_kv=max_seqlen_kv,
                **self._padded(cu_seqlens_q_padded, cu_seqlens_kv_padded),
                **shared,
            )
            attended = self._drop(attended)
        adds = is_own(self.layernorm_mlp, LayerNormMLP)  # the norm's kernel adds
        mlp, residual = self._run_part(
            "layernorm_mlp",
            attended if adds else residual + attended,
            ours={"residual": residual} if adds else None,
            norm=norm,
            is_first_microbatch=is_first_microbatch,
        )
        out = residual + self._drop(mlp)
        return self.layernorm(out) if self.output_layernorm else out

    def _check_masks(self, mask: str, cross_mask: str) -> None:
        op = "TransformerLayer"
        check_mask(op, mask, "self_attn_mask_type")
        check_mask(op, cross_mask, "enc_dec_attn_mask_type")
        if self.attn_input_format == "thd":
            check_packed_mask(op, mask, "self_attn_mask_type")
            if self.layer_type == "decoder":
                check_packed_mask(op, cross_mask, "enc_dec_attn_mask_type")

    def _padded(self, queries: torch.Tensor | None, keys: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        """Where packed sequences begin; for other layouts nothing, which replaced parts may not accept."""
        if self.attn_input_format != "thd":
            return {}
        return {"cu_seqlens_q_padded": queries, "cu_seqlens_kv_padded": keys}

    def _run_part(
        self, name: str, hidden: torch.Tensor, *inputs: object, norm: bool = False, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A submodule's result, and the tensor to add it to: the norm's output with `norm`, otherwise the norm's
        input."""
        options["shape"], options["norm"] = hidden.shape, norm
        result, norm_output, back = run_part("TransformerLayer", self, name, hidden, *inputs, **options)
        return result, norm_output if norm else back

    def _own_draws(self) -> AbstractContextManager:
        """If tokens are divided, each rank drops different ones."""
        if self.sequence_parallel and self.training and self.get_rng_state_tracker is not None:
            tracker = self.get_rng_state_tracker()
            if isinstance(tracker, CudaRNGStatesTracker):
                return tracker.fork()
        return nullcontext()

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden_dropout:
            with self._own_draws():
                x = torch.nn.functional.dropout(x, self.hidden_dropout, self.training)
        if self.drop_path_rate and self.training:
            batch_dim, keep = self.attn_input_format.index("b"), 1.0 - self.drop_path_rate
            shape = [x.shape[dim] if dim == batch_dim else 1 for dim in range(x.dim())]
            with self._own_draws() if batch_dim == 0 else nullcontext():
                kept = torch.bernoulli(torch.full(shape, keep, device=x.device))
            if self.sequence_parallel and batch_dim != 0:  # each rank has a part of every sequence: one draw for all
                kept = torch.ops.te.group_gather(kept, self._tp_group_name, self.tp_size)[:1]
            # At a rate of 1 nothing is kept, so nothing is scaled.
            x = x * (kept / (keep or 1.0)).to(x.dtype)
        return x
