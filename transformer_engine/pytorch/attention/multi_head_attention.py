"""MultiheadAttention: projections, rotary embedding, attention, output projection. Each part is a module of its own."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch._internal.keywords import OF_ATTENTION, check_keywords
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention,
    check_format,
    groups_of,
)
from transformer_engine.pytorch.attention.heads import split_heads
from transformer_engine.pytorch.attention.masks import AttentionMask, Window, swapped_advice
from transformer_engine.pytorch.attention.packed import Pair, check_packed_lengths, check_packed_mask
from transformer_engine.pytorch.attention.qk_norm import make_qk_norm
from transformer_engine.pytorch.attention.rope import apply_rotary_to_packed, apply_rotary_to_pair, packed_positions
from transformer_engine.pytorch.attention.tokens import TokenSizes
from transformer_engine.pytorch.module.base import InitMethod, check_choice, refuse
from transformer_engine.pytorch.module.composite import Composite
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.parallel import check_options, divided, group_size
from transformer_engine.pytorch.module.submodules import is_own, run_part, taken


def _with_batch(tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Packed tokens [t, hidden] as [t, 1, hidden]: each one a batch of its own."""
    return tokens.unsqueeze(1) if tokens is not None and tokens.dim() == 2 else tokens


def _positions(cu_seqlens: Pair, padded: Pair, tokens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of packed queries and keys in their sequences."""
    queries, keys = (
        packed_positions(lengths if starts is None else starts, count, lengths=lengths)
        for lengths, starts, count in zip(cu_seqlens, padded, tokens, strict=True)
    )
    return queries, keys


def _head_size(op: str, hidden_size: int, heads: int, kv_channels: int | None) -> int:
    """The features of a head: kv_channels, or the hidden size divided by the number of heads."""
    check_size(op, "hidden_size", hidden_size, 1)
    check_size(op, "num_attention_heads", heads, 1)
    if kv_channels is not None:
        check_size(op, "kv_channels", kv_channels, 1)
        return kv_channels
    if hidden_size % heads:
        raise ValueError(
            f"{op}: argument 'num_attention_heads' is {heads}, which does not divide hidden_size {hidden_size}; pass "
            "kv_channels."
        )
    return hidden_size // heads


class MultiheadAttention(Composite):
    """proj(attention(q_norm(rope(q)), k_norm(rope(k)), v)) with [q | k | v] = linear(norm(x)) or linear(x).

    Self-attention has the submodules `layernorm_qkv` (with input_layernorm) or `qkv`; attention_type 'cross' takes q
    from `layernorm_query` or `query_layer` and [k | v] of encoder_output, without a norm, from `key_value`. Then
    `core_attention`, `proj`, and with qk_norm_type `q_norm` and `k_norm`, over each head, after the rotary embedding
    unless qk_norm_before_rope. The projections have parameters `query_weight`, `key_weight`, `value_weight` (and
    biases); with fuse_qkv_params one `weight`, whose rows are for each group its query heads, its key and its value, or
    without qkv_weight_interleaved all queries, all keys, all values.
    Shapes: [s, b, hidden] for sbhd, [b, s, hidden] for bshd, [t, hidden] or [t, 1, hidden] for thd (packed sequences).

    tp_size or a tp_group: heads and groups are divided over its ranks; arguments are global sizes; attributes, and
    tensors of a call that go by head (masks, biases, slopes), belong to this rank. With set_parallel_mode the
    projections of q, k and v are column layers and proj is a row layer, and the result covers all heads; without it
    nothing is communicated, and the result is this rank's part of the sum. Of one fused weight a rank has whole groups,
    without qkv_weight_interleaved [q_r | k_r | v_r]. sequence_parallel divides dimension 0 of hidden_states and
    encoder_output as well; attention, its masks and rotary_pos_emb go by the whole sequences. The parameters of q_norm
    and k_norm are the same on every rank, which applies them to its own heads: under sequence_parallel they are marked
    so, and the framework adds up their gradients with those of other marked parameters; otherwise the module does.
    tp_recompute_allgather, tp_overlap (extensions of the common API): as Linear's.
    """

    @check_keywords(retired=OF_ATTENTION)
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
        window_size: Window = None,
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
        *,
        recompute_norm_output: bool = False,
        tp_recompute_allgather: bool = True,
        tp_overlap: str = "auto",
    ) -> None:
        super().__init__()
        op = "MultiheadAttention"
        check_choice(op, "attention_type", attention_type, ("self", "cross"))
        check_format(op, qkv_format)
        head = self.hidden_size_per_attention_head = _head_size(op, hidden_size, num_attention_heads, kv_channels)
        check_options(op, tp_overlap=tp_overlap, tp_recompute_allgather=tp_recompute_allgather)
        ranks = self.tp_size = group_size(op, tp_group, tp_size)
        self.tp_group = tp_group
        self.sequence_parallel = ranks > 1 and sequence_parallel
        self.set_parallel_mode = set_parallel_mode
        groups = groups_of(op, num_attention_heads, num_gqa_groups)
        self.name, self.hidden_size = name, hidden_size
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.num_attention_heads = divided(op, "num_attention_heads", num_attention_heads, ranks)
        self.num_gqa_groups = divided(op, "num_gqa_groups", groups, ranks)
        self.attention_type = attention_type
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self._tokens = self._token_sizes(seq_length, micro_batch_size)
        # Split parameters are joined in the order all queries, all keys, all values.
        self.qkv_weight_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        shared = {
            "sequence_parallel": sequence_parallel,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "get_rng_state_tracker": get_rng_state_tracker,
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "tp_overlap": tp_overlap,
            "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
            "ub_overlap_ag": ub_overlap_ag,
            "ub_overlap_rs": ub_overlap_rs,
        }
        column = {
            "init_method": init_method,
            "ub_bulk_dgrad": ub_bulk_dgrad,
            "ub_bulk_wgrad": ub_bulk_wgrad,
            "tp_recompute_allgather": tp_recompute_allgather,
            **shared,
        }
        norm = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
            "recompute_norm_output": recompute_norm_output,
        }
        self._add_qk_norms(qk_norm_type, qk_norm_eps, **shared)
        self._add_projections(fuse_qkv_params, column, norm)
        self._add_core_attention(
            tp_group=tp_group,
            attention_dropout=attention_dropout,
            bottom_right_diagonal=bottom_right_diagonal,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            softmax_type=softmax_type,
            device=device,
        )
        self.proj = Linear(
            head * (num_attention_heads if set_parallel_mode else self.num_attention_heads),
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            name=name and f"{name}.proj",
            **shared,
        )

    def _token_sizes(self, seq_length: int | None, micro_batch_size: int | None) -> TokenSizes:
        return TokenSizes(
            "MultiheadAttention",
            self.qkv_format,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            ranks=self.tp_size,
            divides=self.tp_size if self.sequence_parallel and self.set_parallel_mode else 1,
        )

    def _add_qk_norms(
        self,
        kind: str | None,
        eps: float,
        *,
        tp_group: object | None,
        params_dtype: torch.dtype | None,
        device: torch.device | str | int | None,
        **_: object,
    ) -> None:
        for submodule in ("q_norm", "k_norm"):
            norm_module = make_qk_norm(
                "MultiheadAttention",
                kind,
                self.hidden_size_per_attention_head,
                eps=eps,
                params_dtype=params_dtype,
                device=device,
                sequence_parallel=self.sequence_parallel,
                tp_group=tp_group,
                adds_up=self.tp_size if self.set_parallel_mode and not self.sequence_parallel else 1,
            )
            self.add_module(submodule, norm_module)

    def _add_projections(self, fused: bool, options: dict[str, object], norm: dict[str, object]) -> None:
        """The projections of queries, keys and values. options: of each of them; norm: of the one with a norm."""

        def add(submodule: str, parts: dict[str, int], with_norm: bool) -> None:
            product = (LayerNormLinear if with_norm else Linear)(
                self.hidden_size,
                sum(parts.values()),
                parallel_mode="column" if self.set_parallel_mode else None,
                parameters_split=None if fused else parts,
                name=self.name and f"{self.name}.{submodule}",
                **(norm if with_norm else {}),
                **options,
            )
            self.add_module(submodule, product)

        # Column layers get the features of all ranks and divide them; other layers get this rank's part.
        head = self.hidden_size_per_attention_head * (self.tp_size if self.set_parallel_mode else 1)
        queries = {"query": self.num_attention_heads * head}
        pairs = {"key": self.num_gqa_groups * head, "value": self.num_gqa_groups * head}
        if self.attention_type == "self":
            add("layernorm_qkv" if self.input_layernorm else "qkv", queries | pairs, self.input_layernorm)
        else:
            add("layernorm_query" if self.input_layernorm else "query_layer", queries, self.input_layernorm)
            add("key_value", pairs, False)

    def _add_core_attention(self, **options: object) -> None:
        self.core_attention = DotProductAttention(
            self.num_attention_heads * self.tp_size,
            self.hidden_size_per_attention_head,
            num_gqa_groups=self.num_gqa_groups * self.tp_size,
            tp_size=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            qkv_format=self.qkv_format,
            attn_mask_type=self.attn_mask_type,
            window_size=self.window_size,
            attention_type=self.attention_type,
            **options,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window = None,
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
        *,
        return_input: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """rotary_pos_emb: angles [s, 1, 1, d] from RotaryPositionEmbedding, or a pair of them for q and k.
        encoder_output: the input of cross-attention; self-attention refuses it. Masks, windows, lengths and biases as
        in DotProductAttention.
        Returns the output, then proj's bias with return_bias, then the norm's output with return_layernorm_output, then
        hidden_states with return_input (an extension of the common API, for attention with input_layernorm: the
        gradient of a residual branch that reads it is added inside the norm's backward)."""
        op = "MultiheadAttention"
        refuse(op, "a key-value cache", inference_params=inference_params is not None)
        if return_input and not self.input_layernorm:
            raise ValueError(
                f"{op}: argument 'return_input' is True, but the attention has no norm in front; wanted False, or "
                "input_layernorm=True in the constructor."
            )
        self._check_inputs(hidden_states, encoder_output)
        thd, padded = self.qkv_format == "thd", {}
        flat = thd and hidden_states.dim() == 2
        lengths, starts = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        if thd:
            check_packed_mask(op, attn_mask_type or self.attn_mask_type)
            check_packed_lengths(op, lengths, starts, (max_seqlen_q, max_seqlen_kv))
            hidden_states, encoder_output = _with_batch(hidden_states), _with_batch(encoder_output)
            padded = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
        query, key, value, beside = self._project(
            hidden_states,
            encoder_output,
            rotary_pos_emb,
            is_first_microbatch=is_first_microbatch,
            return_input=return_input,
            packed=(lengths, starts),
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
            **padded,
        )
        width = self.num_attention_heads * self.hidden_size_per_attention_head
        context, _ = taken(op, "core_attention", self.core_attention, context, width)
        if thd:
            context = context.unsqueeze(1)
        projected, bias = self.proj(context, is_first_microbatch=is_first_microbatch), None
        if self.return_bias and isinstance(projected, tuple) and len(projected) == 2:
            projected, bias = projected
        projected, _ = taken(op, "proj", self.proj, projected, self.hidden_size)
        if flat:
            projected, beside = projected.squeeze(1), [t.squeeze(1) for t in beside]
        results = [projected, *([bias] if self.return_bias else []), *beside]
        return tuple(results) if len(results) > 1 else projected

    def _check_inputs(self, hidden_states: torch.Tensor, encoder_output: torch.Tensor | None) -> None:
        op = "MultiheadAttention"
        cross = self.attention_type == "cross"
        if cross != (encoder_output is not None):
            got, wanted = ("None", "a tensor") if cross else ("given", "None")
            raise ValueError(
                f"{op}: argument 'encoder_output' is {got}, wanted {wanted}, as attention_type is "
                f"{self.attention_type!r}."
            )
        for name, tensor in (("hidden_states", hidden_states), ("encoder_output", encoder_output)):
            if tensor is None and name == "encoder_output":
                continue
            if type(tensor) is not torch.Tensor:
                check_tensor(op, name, tensor)
            if self.qkv_format == "thd":
                if tensor.dim() != 2 and (tensor.dim() != 3 or tensor.shape[1] != 1):
                    raise ValueError(
                        f"{op}: argument '{name}' has shape {tuple(tensor.shape)}, wanted (t, hidden) or (t, 1, "
                        "hidden) in thd."
                    )
            elif tensor.dim() != 3:
                raise ValueError(
                    f"{op}: argument '{name}' has shape {tuple(tensor.shape)}, wanted three dimensions "
                    f"({self.qkv_format[:2]}, hidden)."
                )
        self._tokens.check_order(op, hidden_states)
        self._tokens.check_length(op, hidden_states)
        if not cross or self.qkv_format == "thd":
            return
        batch_dim = self.qkv_format.index("b")
        if encoder_output.shape[batch_dim] != hidden_states.shape[batch_dim]:
            swapped = encoder_output.shape[1 - batch_dim] == hidden_states.shape[1 - batch_dim]
            raise ValueError(
                f"{op}: argument 'encoder_output' has shape {tuple(encoder_output.shape)} in {self.qkv_format}, wanted "
                f"the batch size {hidden_states.shape[batch_dim]} of 'hidden_states'"
                + (f"; {swapped_advice(self.qkv_format)}" if swapped else ".")
            )

    def _project(
        self,
        hidden_states: torch.Tensor,
        encoder_output: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
        is_first_microbatch: bool | None,
        return_input: bool,
        packed: tuple[Pair, Pair],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """query, key and value, rotated and normed, and the first projection's results besides its product. packed: the
        cumulative lengths, and the rows where sequences begin."""
        cross = self.attention_type == "cross"
        if rotary_pos_emb is not None:
            self._tokens.check_rotary(
                "MultiheadAttention", rotary_pos_emb, hidden_states, encoder_output if cross else hidden_states
            )
        op, own = "MultiheadAttention", self.num_attention_heads * self.hidden_size_per_attention_head
        kv_features = 2 * self.num_gqa_groups * self.hidden_size_per_attention_head
        if self.input_layernorm:
            first = "layernorm_query" if cross else "layernorm_qkv"
        else:
            first = "query_layer" if cross else "qkv"
        norm = self.input_layernorm and self.return_layernorm_output
        projected, norm_output, back = run_part(
            op,
            self,
            first,
            hidden_states,
            shape=own if cross else own + kv_features,
            ours={"return_input": True} if return_input and is_own(getattr(self, first), LayerNormLinear) else None,
            norm=norm,
            is_first_microbatch=is_first_microbatch,
        )
        beside = [*([norm_output] if norm else []), *([back] if return_input else [])]
        counts, head = (self.num_attention_heads, self.num_gqa_groups), self.hidden_size_per_attention_head
        groups = self.num_gqa_groups if self.qkv_weight_interleaved else 1
        thd = self.qkv_format == "thd"
        layout = {"tensor_format": "bshd" if thd else self.qkv_format, "interleaved": self.rotary_pos_interleaved}
        norm_first = self.q_norm is not None and self.qk_norm_before_rope
        rotated, tokens = rotary_pos_emb is None, (projected.size(0), projected.size(0))
        if cross:
            pairs, _, _ = run_part(
                op, self, "key_value", encoder_output, shape=kv_features, is_first_microbatch=is_first_microbatch
            )
            query, tokens = projected.unflatten(-1, (-1, head)), (projected.size(0), pairs.size(0))
            key, value = split_heads(pairs, (counts[1], counts[1]), head, groups)
        elif rotated or norm_first or (thd and not all(queries is keys for queries, keys in packed)):
            query, key, value = split_heads(projected, (counts[0], counts[1], counts[1]), head, groups)
        else:
            positions = _positions(*packed, tokens)[0] if thd else None
            layout |= {"heads": counts, "groups": groups, "start_positions": positions}
            query, key, value = apply_rotary_to_packed(projected, rotary_pos_emb, **layout)
            rotated = True
        if norm_first:
            query, key = self.q_norm(query), self.k_norm(key)
        if not rotated:
            layout["start_positions"] = _positions(*packed, tokens) if thd else (None, None)
            query, key = apply_rotary_to_pair(query, key, rotary_pos_emb, **layout)
        if self.q_norm is not None and not norm_first:
            query, key = self.q_norm(query), self.k_norm(key)
        if thd:
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        return query, key, value, beside
