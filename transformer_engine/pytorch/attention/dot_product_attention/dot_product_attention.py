"""DotProductAttention on torch's scaled_dot_product_attention, or on functional.attention where torch has no backend:
checks, layouts, dropout's random state, recomputation. masks.py makes the mask, backends.py selects the backend; no
softmax is computed here."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch import _C, functional
from transformer_engine.pytorch._internal.arguments import check_number, check_size, check_tensor
from transformer_engine.pytorch._internal.keywords import OF_ATTENTION, check_keywords
from transformer_engine.pytorch._internal.torch_autocast import is_autocast, to_autocast
from transformer_engine.pytorch._internal.torch_private import flash_attention_forward
from transformer_engine.pytorch.attention.backends import (
    AttentionPath,
    active_flash,
    attention_path,
    flash_takes,
    no_backend_left,
    path_taken,
    repeats_bits,
    taken_away,
)
from transformer_engine.pytorch.attention.masks import (
    AttentionMask,
    Scores,
    Sizes,
    build_scores,
    check_arbitrary,
    check_bias,
    check_mask,
    check_padding,
    check_window,
    default_slopes,
    masks_of,
    present_tokens,
)
from transformer_engine.pytorch.attention.memory_order import (
    aligned,
    by_token,
    in_torch_func,
    inputs_without_padding,
    result_without_padding,
    starts_aligned,
    zeroed,
)
from transformer_engine.pytorch.attention.packed import (
    Bounds,
    Pair,
    check_packed,
    longest,
    packed_of_batch,
    refuse_dropout,
    separate,
)
from transformer_engine.pytorch.constants import AttnTypes
from transformer_engine.pytorch.distributed.recompute import checkpoint
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, check_choice, refuse
from transformer_engine.pytorch.module.parallel import check_ranks, divided, group_size
from transformer_engine.pytorch.utils import resolve_device


def check_format(op: str, qkv_format: str, argument: str = "qkv_format") -> None:
    check_choice(op, argument, qkv_format, ("sbhd", "bshd", "thd"))


def groups_of(op: str, heads: int, groups: int | None) -> int:
    """The number of key and value heads; each is shared by heads / groups query heads."""
    check_size(op, "num_attention_heads", heads, 1)
    groups = heads if groups is None else groups
    if groups < 1 or heads % groups:
        raise ValueError(
            f"{op}: argument 'num_gqa_groups' is {groups}, wanted a divisor of num_attention_heads {heads}."
        )
    return groups


class DotProductAttention(TransformerEngineBaseModule):
    """softmax(scale * q k^T, masked) v. Shapes: q [s, b, h, d], k and v [s_kv, b, g, d] for sbhd (b first for bshd);
    the result is [s, b, h * d] (or [b, s, h * d]). h is a multiple of g: each group of h / g heads shares a k and a v.
    thd: q [t, h, d], k and v [t_kv, g, d] hold sequences one after another, the result is [t, h * d].

    masked: attn_mask_type, narrowed by window_size = (keys before, keys after the diagonal, -1 for all of them). The
    diagonal starts top left for causal and padding_causal and ends bottom right for *_bottom_right, and for the other
    masks unless bottom_right_diagonal is False. With padding each sequence has its own length, and its tokens come
    first. The result of a query that sees no key, or is padding, is zero, and so are its gradients. The values of the
    padding do not matter.
    Biases: scale * (q k^T + bias) for pre_scale_bias, scale * q k^T + bias for post_scale_bias (with a gradient if it
    requires one), and scale * q k^T - slope * |distance from the diagonal| for alibi.
    softmax_type: off-by-one and learnable add exp(a) to each softmax's denominator, a sink of weight without a value; a
    is 0, or the parameter softmax_offset, float32 [h], zeros at first, on `device` (an extension of the common API).
    return_max_logit: the call returns (result, m), m [h] the largest seen score of each head, without the sink and
    without a gradient.
    functional.attention computes packed sequences, sinks, soft-capped scores and the largest logit without a tensor of
    queries x keys; it has no dropout. Its kernel flash takes packed sequences and sinks in 16 bits on a GPU, chunked
    the others.

    A module that is made with NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN=0 in the environment does not use
    flash, cuDNN or the plain backend.
    tp_size or a tp_group: heads and groups are divided over its ranks; attributes, q, k and v, and the per-head parts
    of masks, biases and slopes, belong to this rank. Nothing is communicated. Dropout is drawn inside
    get_rng_state_tracker().fork(), unless sequence_parallel: then the caller forks around the whole layer.
    Determinism: attention repeats its bits under torch.use_deterministic_algorithms(True), and in a module that is made
    with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment.
    """

    # Of modules that were pickled without them.
    softmax_type, return_max_logit, _repeats_bits = "vanilla", False, False

    @check_keywords(retired=OF_ATTENTION)
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
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        op = "DotProductAttention"
        refuse(op, "context parallelism", cp_group=cp_group)
        check_choice(op, "softmax_type", softmax_type, ("vanilla", "off-by-one", "learnable"))
        check_choice(op, "attention_type", attention_type, AttnTypes)
        check_mask(op, attn_mask_type)
        check_window(op, window_size)
        check_format(op, qkv_format)
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(f"{op}: argument 'attention_dropout' is {attention_dropout}, wanted 0 <= p < 1.")
        if softmax_scale is not None:
            check_number(op, "softmax_scale", softmax_scale, "a finite number above 0", lambda scale: scale > 0)
        self.name = name
        self.tp_size = group_size(op, tp_group, tp_size)
        self.tp_group = tp_group
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        groups = groups_of(op, num_attention_heads, num_gqa_groups)
        self.num_attention_heads = divided(op, "num_attention_heads", num_attention_heads, self.tp_size)
        self.num_gqa_groups = divided(op, "num_gqa_groups", groups, self.tp_size)
        if isinstance(kv_channels, tuple) and len(kv_channels) != 2:
            raise ValueError(
                f"{op}: argument 'kv_channels' is {kv_channels!r}, wanted a head_dim, or a pair for q and k, and for v."
            )
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        )
        for head_dim in (self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v):
            check_size(op, "kv_channels", head_dim, 1)
        self._flash_fits = flash_takes((self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v))
        self._away, self._repeats_bits = taken_away(), repeats_bits()
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softmax_scale = self.hidden_size_per_attention_head_k**-0.5 if softmax_scale is None else softmax_scale
        self.attention_type = attention_type
        self.layer_number = layer_number
        self.get_rng_state_tracker = get_rng_state_tracker
        self.softmax_type, self.return_max_logit, self.softmax_offset = softmax_type, return_max_logit, None
        if softmax_type == "learnable":
            self._declare_sink(device)

    def _declare_sink(self, device: torch.device | str | int | None) -> None:
        """The parameter softmax_offset: the score of the sink of each head of this rank."""
        del self.softmax_offset
        self.params_dtype, self.device = torch.float32, resolve_device(device)
        marks = {"tensor_model_parallel": self.tp_size > 1, "partition_dim": 0, "partition_stride": 1}
        self._declare("softmax_offset", (self.num_attention_heads,), torch.nn.init.zeros_, **marks)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: AttentionMask = None,
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
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """attention_mask, True where masked out: for padding masks [b, 1, 1, s], or a tuple of two for queries and keys
        that differ; cu_seqlens_q and cu_seqlens_kv (int32 [b + 1]) give the same by lengths. For the arbitrary mask
        [1 or b, 1 or h, s, s_kv]. Other masks read none of them. core_attention_bias [1 or b, 1 or h, s, s_kv];
        alibi_slopes float32 [h] or [b, h], by default those of the ALiBi paper. None means the value of the
        constructor. softcap c: the scores are c tanh(s / c), before biases and masks.
        thd: a padding mask, with cu_seqlens_* (int32 [sequences + 1]) for the tokens of each sequence, and
        cu_seqlens_*_padded for the rows where they begin, if there is padding. Rows of padding may hold any finite
        value; their results and gradients are 0. max_seqlen_* bound the lengths; without them a GPU's host waits once
        to read the longest. Lengths that do not fit raise a ValueError on the CPU; a GPU asserts on the device.
        qkv_layer [.., 3, h, d], or kv_layer [.., 2, g, d] beside query_layer, in place of separate tensors;
        qkv_interleave_dim -2: [.., h, 3, d].
        Accepted without an effect on results: fast_zero_fill, num_splits, pad_between_seqs, bf16_backward, and with
        other layouts than thd max_seqlen_* and cu_seqlens_*_padded."""
        op = "DotProductAttention"
        mask = attn_mask_type or self.attn_mask_type
        layout = qkv_format or self.qkv_format
        window = self.window_size if window_size is None else window_size
        bottom_right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        check_mask(op, mask)
        check_window(op, window)
        check_format(op, layout)
        refuse(op, "a key-value cache", inference_params=inference_params is not None)
        refuse(op, "FP8", fp8_output=fp8_output)
        refuse(op, "a score modification", score_mod=score_mod is not None)
        if softcap is not None:
            check_number(op, "softcap", softcap, "a finite number above 0, or None for none", lambda cap: cap >= 0)
        packed_inputs = {"qkv_layer": qkv_layer, "kv_layer": kv_layer, "interleave_dim": qkv_interleave_dim}
        tensors = separate(op, layout, query_layer, key_layer, value_layer, **packed_inputs)
        self._check_qkv(*tensors, layout)
        lengths, padded = (cu_seqlens_q, cu_seqlens_kv), (cu_seqlens_q_padded, cu_seqlens_kv_padded)
        max_seqlens = (max_seqlen_q, max_seqlen_kv)
        bias = (core_attention_bias_type, core_attention_bias, alibi_slopes)
        rows = (attention_mask, lengths, padded, max_seqlens)
        sizes, biases = self._check_call(*tensors[:2], layout, mask, rows, bias)
        if is_autocast(tensors[0]):
            tensors = tuple(map(to_autocast, tensors))
        path = attention_path(
            sizes.device,
            tensors[0].dtype,
            mask=mask,
            window=window,
            bottom_right=bottom_right,
            bias=core_attention_bias_type,
            bias_grad=core_attention_bias_type != "no_bias"
            and any(t is not None and t.requires_grad for t in biases.values()),
            dropout=self._dropout(),
            repeat_bits=self._repeats_bits,
            seq_q=sizes.seqs[0],
            seq_kv=sizes.seqs[1],
            flash_fits=self._flash_fits and tensors[0].numel() > 0 and tensors[1].numel() > 0,
            away=self._away,
            packed=layout == "thd",
            sink=self.softmax_type != "vanilla",
            softcap=bool(softcap),
            max_logit=self.return_max_logit,
            widest_head=max(tensors[0].shape[-1], tensors[2].shape[-1]),
            same_lengths=(attention_mask is None or layout == "thd") and cu_seqlens_q is cu_seqlens_kv,
            lengths=0 if layout == "thd" or in_torch_func() else sizes.batch,
            masks=masks_of(attention_mask) if layout != "thd" else 0,
            flash_impl=active_flash(),
        )
        scores = {"attention_mask": attention_mask, "cu_seqlens": lengths, "bias_kind": core_attention_bias_type}
        if path.kernel:
            scores |= biases | {"softcap": softcap, "padded": padded, "max_seqlens": max_seqlens}
            run, attn_mask = partial(self._by_kernel, sizes=sizes, path=path, **scores), None
        else:
            run, attn_mask = self._by_torch(sizes, path, **scores, **biases)
        if checkpoint_core_attention:
            tracker = {"get_rng_state_tracker": self.get_rng_state_tracker} if self._forks() else {}
            return checkpoint(run, *tensors, attn_mask, use_reentrant=False, **tracker)
        return run(*tensors, attn_mask)

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Stores the group. Errors: ValueError if its size differs from the number that divides the heads."""
        if self.tp_size > 1:
            check_ranks("DotProductAttention", tp_group, self.tp_size)
        self.tp_group = tp_group

    def _own_slopes(self, device: torch.device) -> torch.Tensor:
        """The slopes of this rank's heads, by its rank in the group."""
        group = self.tp_group
        if group is None:
            raise RuntimeError(
                f"DotProductAttention: argument 'alibi_slopes' is None and the heads are divided over {self.tp_size} "
                "ranks (tp_size), but without a group this rank's heads are unknown; pass the slopes, or call "
                "set_tensor_parallel_group() first."
            )
        heads = self.num_attention_heads
        return default_slopes(heads * self.tp_size, device).narrow(0, group.rank() * heads, heads)

    def set_context_parallel_group(
        self, cp_group: object | None, cp_global_ranks: list[int] | None, cp_stream: object | None, cp_comm_type="p2p"
    ) -> None:
        """No group leaves the attention undivided; a group is refused."""
        refuse("DotProductAttention", "context parallelism", cp_group=cp_group)

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _forks(self) -> bool:
        return self._dropout() > 0.0 and self.get_rng_state_tracker is not None and not self.sequence_parallel

    def _check_qkv(self, query, key, value, layout: str) -> None:
        op = "DotProductAttention"
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        dims, batch_dim = len(layout), 1 if layout == "sbhd" else 0
        for name, tensor, wanted in (
            ("query_layer", query, (heads, self.hidden_size_per_attention_head_k)),
            ("key_layer", key, (groups, self.hidden_size_per_attention_head_k)),
            ("value_layer", value, (groups, self.hidden_size_per_attention_head_v)),
        ):
            if tensor is not None and type(tensor) is not torch.Tensor:
                check_tensor(op, name, tensor)
            if tensor is None or tensor.dim() != dims or tuple(tensor.shape[-2:]) != wanted:
                got, any_size = None if tensor is None else tuple(tensor.shape), "., " * (dims - 2)
                raise ValueError(
                    f"{op}: argument '{name}' has shape {got}, wanted [{any_size}{wanted[0]}, {wanted[1]}]."
                )
            if not tensor.is_floating_point():
                raise ValueError(f"{op}: argument '{name}' is {tensor.dtype}, wanted float32, float16 or bfloat16.")
            mixed = tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type)
            if mixed or tensor.device != query.device:
                raise ValueError(
                    f"{op}: argument '{name}' is {tensor.dtype} on {tensor.device}, wanted {query.dtype} on "
                    f"{query.device} like 'query_layer'."
                )
            if layout != "thd" and tensor.shape[batch_dim] != query.shape[batch_dim]:
                raise ValueError(
                    f"{op}: argument '{name}' has shape {tuple(tensor.shape)} in {layout}, wanted the batch size "
                    f"{query.shape[batch_dim]} of 'query_layer'."
                )
        if value.shape[:-2] != key.shape[:-2]:
            raise ValueError(
                f"{op}: argument 'value_layer' has shape {tuple(value.shape)}, wanted the sequence length of "
                f"'key_layer', {tuple(key.shape)}."
            )

    def _check_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        layout: str,
        mask: str,
        rows: tuple[AttentionMask, Pair, Pair, Bounds],
        bias: tuple[str, torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[Sizes, dict[str, torch.Tensor | None]]:
        """The sizes of the sequences, and what is added to their scores: bias (its type, its tensor, the slopes). rows:
        the mask, the cumulative lengths, the rows where sequences begin, the bounds of the lengths."""
        op, device, (kind, added, slopes) = "DotProductAttention", query.device, bias
        attention_mask, lengths, padded, max_seqlens = rows
        if layout == "thd":
            options = {"bias": kind, "dropout": self._dropout(), "on_cuda": query.is_cuda}
            check_packed(op, mask, lengths, padded, max_seqlens, **options)
            sizes = Sizes(len(lengths[0]) - 1, (query.shape[0], key.shape[0]), device, layout)
        else:
            seq_dim = 0 if layout == "sbhd" else 1
            seqs = (query.shape[seq_dim], key.shape[seq_dim])
            sizes = Sizes(query.shape[1 - seq_dim], seqs, device, layout)
        if self.tp_size > 1 and kind == "alibi" and slopes is None:
            slopes = self._own_slopes(device)
        biases = {"bias": added, "slopes": slopes}
        check_bias(op, kind, sizes, **biases, heads=self.num_attention_heads)
        if "padding" in mask and layout != "thd":
            check_padding(op, attention_mask, lengths, sizes)
        elif mask == "arbitrary":
            check_arbitrary(op, attention_mask, sizes, heads=self.num_attention_heads)
        return sizes, biases

    def _by_torch(self, sizes: Sizes, path: AttentionPath, **scores) -> tuple[Callable, torch.Tensor | None]:
        """torch's attention as a function of q, k, v and the mask tensor."""
        made = Scores(None, None, None)
        if path.mask_tensor:
            if scores["bias"] is not None and not starts_aligned(scores["bias"]):
                scores["bias"] = scores["bias"].clone()
            made = build_scores(
                path.pattern,
                batch=sizes.batch,
                seqs=sizes.seqs,
                device=sizes.device,
                heads=self.num_attention_heads,
                dtype=path.dtype,
                scale=self.softmax_scale,
                **scores,
            )
        hidden = scores["cu_seqlens"][0] if path.padding_outside else None
        options = {"unseen": made.unseen, "padding": made.padding, "hidden": hidden}
        run = partial(self._attend, layout=sizes.layout, path=path, **options)
        return run, made.attn_mask

    def _by_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _: None,
        *,
        sizes: Sizes,
        path: AttentionPath,
        attention_mask: AttentionMask,
        cu_seqlens: Pair,
        padded: Pair,
        max_seqlens: Bounds,
        bias_kind: str,
        bias: torch.Tensor | None,
        slopes: torch.Tensor | None,
        softcap: float | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """functional.attention, which takes the pattern as numbers and makes no tensor of queries x keys."""
        refuse_dropout("DotProductAttention", self._dropout(), "a sink, a cap or the maximum logit")
        pattern, rows, batch_first = path.pattern, {}, sizes.layout == "bshd"
        if path.padding_outside:
            query, key, value = inputs_without_padding((query, key, value), cu_seqlens[0], batch_first)
        if sizes.layout == "thd":
            for i, side in enumerate(("q", "kv")):
                rows[f"cu_seqlens_{side}"] = cu_seqlens[i]
                if padded[i] is not cu_seqlens[i]:  # the same tensor: no padding between sequences
                    rows[f"cu_seqlens_{side}_padded"] = padded[i]
                rows[f"max_seqlen_{side}"] = longest(cu_seqlens[i], max_seqlens[i])
        elif path.as_packed:
            of_batch = attention_mask, cu_seqlens, sizes.seqs, sizes.layout
            (query, key, value), rows, from_rows = packed_of_batch((query, key, value), *of_batch)
        elif pattern.padding:
            rows["present_q"], rows["present_kv"] = present_tokens(attention_mask, cu_seqlens, sizes.seqs)
        elif pattern.arbitrary:
            rows["mask"] = attention_mask
        if bias_kind == "alibi":
            rows["alibi_slopes"] = default_slopes(self.num_attention_heads, sizes.device) if slopes is None else slopes
        elif bias_kind != "no_bias":
            rows["bias"] = bias
            rows["bias_scale"] = self.softmax_scale if bias_kind == "pre_scale_bias" else 1.0
        out, _, max_logit = functional.attention(
            query,
            key,
            value,
            layout="thd" if path.as_packed else sizes.layout,
            scale=self.softmax_scale,
            softcap=softcap or 0.0,
            window=(pattern.left, pattern.right),
            bottom_right=pattern.bottom_right,
            sink=self._sink(sizes.device),
            kernel=path.kernel,
            **rows,
        )
        if not torch.compiler.is_compiling() and _C.is_recording():
            _C.record_path("attention", *path_taken(out, path))
        if path.padding_outside:
            out = result_without_padding(out, cu_seqlens[0], batch_first)
        if path.as_packed:
            out = from_rows(out)
        out = out.flatten(-2)
        return (out, max_logit.detach().to(out.dtype)) if self.return_max_logit else out

    def _sink(self, device: torch.device) -> torch.Tensor | None:
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_attention_heads, dtype=torch.float32, device=device)
        return self.softmax_offset.float() if self.softmax_type == "learnable" else None

    def _attend(
        self,
        query,
        key,
        value,
        attn_mask,
        *,
        layout: str,
        path: AttentionPath,
        unseen: torch.Tensor | None,
        padding: tuple[torch.Tensor, torch.Tensor] | None,
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """unseen, padding: of Scores. hidden: cumulative lengths, where the padding lies outside (AttentionPath)."""
        to_bhsd, from_bhsd = ((1, 2, 0, 3), (2, 0, 1, 3)) if layout == "sbhd" else ((0, 2, 1, 3), (0, 2, 1, 3))
        if padding is not None:
            q_padding, kv_padding = (t.permute(from_bhsd) for t in padding)
            query, key, value = zeroed(query, q_padding), zeroed(key, kv_padding), zeroed(value, kv_padding)
        if hidden is not None:
            query, key, value = inputs_without_padding((query, key, value), hidden, layout == "bshd")
        if query.is_cuda:
            query, key, value = aligned(query), aligned(key), aligned(value)
        q, k, v = (t.permute(to_bhsd) for t in (query, key, value))
        grouped = self.num_gqa_groups != self.num_attention_heads
        if grouped and path.repeat_groups:
            repeats = self.num_attention_heads // self.num_gqa_groups
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
            grouped = False
        options = {"dropout_p": self._dropout(), "is_causal": path.is_causal, "scale": self.softmax_scale}
        chosen = nullcontext()
        if path.backends is not None and not path.flash_window:
            # Fused kernels return nothing for an empty batch.
            backends = path.backends if q.numel() and k.numel() else (SDPBackend.MATH,)
            chosen = sdpa_kernel(list(backends), set_priority=True)
        fork = self.get_rng_state_tracker().fork() if self._forks() else nullcontext()
        with chosen, fork:
            if path.flash_window:
                out = self._flash(q, k, v, path)
            else:
                attend = self._by_what_is_left if self._away else scaled_dot_product_attention
                out = attend(q, k, v, attn_mask, **options, enable_gqa=grouped)
        if not torch.compiler.is_compiling() and _C.is_recording():
            _C.record_path("attention", *path_taken(out, path))
        out = by_token(out, from_bhsd, gradient=path.gradient)
        if unseen is not None:
            out = zeroed(out, unseen[(None,) * (4 - unseen.dim())].permute(from_bhsd))
        if hidden is not None:
            out = result_without_padding(out, hidden, layout == "bshd")
        return out.flatten(2)

    def _by_what_is_left(self, *tensors, **options) -> torch.Tensor:
        """If the environment disabled backends, the others may not support this input."""
        try:
            return scaled_dot_product_attention(*tensors, **options)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise no_backend_left(self._away, "The others do not support it.") from error
            raise

    def _flash(self, q, k, v, path: AttentionPath) -> torch.Tensor:
        """PyTorch's flash attention by its own entry, which unlike scaled_dot_product_attention supports a window."""
        q, k, v = (t.transpose(1, 2).to(path.dtype) for t in (q, k, v))  # autocast does not handle this entry
        out, *_ = flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            q.shape[1],
            k.shape[1],
            self._dropout(),
            False,
            False,
            scale=self.softmax_scale,
            window_size_left=path.pattern.left,
            window_size_right=path.pattern.right,
        )
        return out.transpose(1, 2)
