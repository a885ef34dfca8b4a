"""Packed inputs of attention: q, k and v in one tensor, and sequences one after another (thd), which those of a batch
can be too. Checks and views, and the index that gathers the tokens of a batch."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch.attention.masks import AttentionMask, masks_of

PACKED_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")


def separate(
    op: str,
    layout: str,
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    *,
    qkv_layer: torch.Tensor | None,
    kv_layer: torch.Tensor | None,
    interleave_dim: int,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """q, k and v: views of qkv_layer, or of kv_layer beside the query, or the tensors as they are."""
    if qkv_layer is None and kv_layer is None:
        return query, key, value
    name, packed = ("qkv_layer", qkv_layer) if qkv_layer is not None else ("kv_layer", kv_layer)
    excluded = {"key_layer": key, "value_layer": value}
    if name == "qkv_layer":
        excluded |= {"query_layer": query, "kv_layer": kv_layer}
    for other, tensor in excluded.items():
        if tensor is not None:
            raise ValueError(f"{op}: arguments '{name}' and '{other}' are given, which exclude each other; leave one.")
    if interleave_dim not in (-3, -2):
        raise ValueError(
            f"{op}: argument 'qkv_interleave_dim' is {interleave_dim!r}, wanted -3 (the {name[:-6]} before the heads) "
            "or -2 (after them)."
        )
    if type(packed) is not torch.Tensor:
        check_tensor(op, name, packed)
    parts, dims = len(name) - len("_layer"), len(layout) + 1
    if packed.dim() != dims or packed.shape[interleave_dim] != parts:
        order = f"{parts}, heads" if interleave_dim == -3 else f"heads, {parts}"
        raise ValueError(
            f"{op}: argument '{name}' has shape {tuple(packed.shape)}, wanted [{'., ' * (dims - 3)}{order}, head_dim] "
            f"in {layout}."
        )
    views = packed.unbind(interleave_dim)
    return views if parts == 3 else (query, *views)


# Of queries and of keys: cumulative lengths, the rows where sequences begin, or bounds of the lengths.
Pair = tuple[torch.Tensor | None, torch.Tensor | None]
Bounds = tuple[int | None, int | None]


def check_packed_mask(op: str, mask: str, argument: str = "attn_mask_type") -> None:
    if mask not in PACKED_MASKS:
        raise ValueError(f"{op}: argument '{argument}' is {mask!r}, wanted one of {PACKED_MASKS} in thd.")


def check_packed_lengths(op: str, cu_seqlens: Pair, padded: Pair, max_seqlens: Bounds) -> None:
    """Types and shapes; the op checks the values."""
    for side, lengths, starts, bound in zip(("q", "kv"), cu_seqlens, padded, max_seqlens, strict=True):
        _check_cumulative(op, f"cu_seqlens_{side}", lengths)
        if starts is not None:
            _check_cumulative(op, f"cu_seqlens_{side}_padded", starts)
            if starts.shape[0] != lengths.shape[0]:
                raise ValueError(
                    f"{op}: argument 'cu_seqlens_{side}_padded' has {starts.shape[0]} elements, wanted the "
                    f"{lengths.shape[0]} of 'cu_seqlens_{side}'."
                )
        if bound is not None:
            check_size(op, f"max_seqlen_{side}", bound)


def _check_cumulative(op: str, name: str, t: object) -> None:
    if isinstance(t, torch.Tensor) and t.dim() == 1 and t.dtype == torch.int32 and t.shape[0] > 0:
        return
    got = f"{t.dtype} {list(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)
    raise ValueError(f"{op}: argument '{name}' is {got}, wanted int32 [sequences + 1] in thd.")


def check_packed(
    op: str, mask: str, cu_seqlens: Pair, padded: Pair, max_seqlens: Bounds, *, bias: str, dropout: float, on_cuda: bool
) -> None:
    """The mask, lengths and options of a packed call."""
    check_packed_mask(op, mask)
    check_packed_lengths(op, cu_seqlens, padded, max_seqlens)
    if bias in ("pre_scale_bias", "post_scale_bias"):
        raise ValueError(
            f"{op}: argument 'core_attention_bias_type' is {bias!r}, wanted 'no_bias' or 'alibi' in thd: a bias that "
            "is a tensor needs sequences in a batch."
        )
    refuse_dropout(op, dropout, "packed sequences (thd)")
    reads = on_cuda and None in max_seqlens and not torch.compiler.is_compiling()
    if reads and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{op}: arguments 'max_seqlen_q' and 'max_seqlen_kv' are {max_seqlens[0]} and {max_seqlens[1]}, wanted "
            "numbers in a capture, where the lengths cannot be read."
        )


def refuse_dropout(op: str, dropout: float, why: str) -> None:
    if dropout:
        raise NotImplementedError(
            f"{op}: argument 'attention_dropout' is {dropout}, but dropout with {why} is not available in this "
            "version; set it to 0, or call eval()."
        )


def longest(cu_seqlens: torch.Tensor, given: int | None) -> int | None:
    """The bound of the lengths on a GPU, read once where it is not given; the CPU's op reads the lengths."""
    if given is not None or not cu_seqlens.is_cuda or torch.compiler.is_compiling() or len(cu_seqlens) == 1:
        return given
    return int(cu_seqlens.diff().max())


# ---- a batch as packed sequences ----


def packed_of_batch(
    tensors: tuple[torch.Tensor, ...],
    attention_mask: AttentionMask,
    cu_seqlens: Pair,
    seqs: tuple[int, int],
    layout: str,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | int], Callable[[torch.Tensor], torch.Tensor]]:
    """q, k and v of a batch as rows [b s, heads, d], the arguments of functional.attention for their sequences, and the
    way of its result back. Sequences of these lengths stay where they lie, with padding between them; a mask may hide
    any row, so the tokens are gathered. The host does not wait."""
    if attention_mask is None:
        in_place = tuple(_in_rows(t, layout) for t in tensors)
        return in_place, _rows_of_batch(cu_seqlens, seqs), partial(_from_rows, layout, seqs[0])
    queries, keys = tokens_of(attention_mask, layout)
    rows = {"cu_seqlens_q": queries.cu_seqlens, "cu_seqlens_kv": keys.cu_seqlens}
    rows |= {"max_seqlen_q": seqs[0], "max_seqlen_kv": seqs[1]}
    flat = (t.flatten(0, 1) for t in tensors)
    of_keys = (None, None) if keys is queries else (keys.order, keys.place)  # Dynamo takes no tensor twice
    gathered = _Gather.apply(queries.order, queries.place, *of_keys, *flat)
    return gathered, rows, partial(_scatter, queries, tensors[0].shape[:2])


def _in_rows(t: torch.Tensor, layout: str) -> torch.Tensor:
    return (t if layout == "bshd" else t.transpose(0, 1)).flatten(0, 1)


def _from_rows(layout: str, seq: int, t: torch.Tensor) -> torch.Tensor:
    t = t.unflatten(0, (-1, seq))
    return t if layout == "bshd" else t.transpose(0, 1).contiguous()


def _rows_of_batch(cu_seqlens: Pair, seqs: tuple[int, int]) -> dict[str, torch.Tensor | int]:
    """Sequences begin at every multiple of the rows of one."""
    rows, starts = {}, None
    for i, side in enumerate(("q", "kv")):
        if i == 0 or seqs[0] != seqs[1]:
            ends = seqs[i] * len(cu_seqlens[i])
            starts = torch.arange(0, ends, seqs[i], dtype=torch.int32, device=cu_seqlens[i].device)
        rows[f"cu_seqlens_{side}"], rows[f"cu_seqlens_{side}_padded"] = cu_seqlens[i], starts
        rows[f"max_seqlen_{side}"] = seqs[i]
    return rows


class Tokens(NamedTuple):
    """Of the rows of a batch in memory, its first two dimensions as one: `order` has the tokens of one sequence after
    another, then the padding; `place` is its inverse. cu_seqlens: int32 [b + 1]."""

    order: torch.Tensor
    place: torch.Tensor
    cu_seqlens: torch.Tensor


def tokens_of(attention_mask: AttentionMask, layout: str) -> tuple[Tokens, Tokens]:
    """Of the queries and of the keys, by padding masks. In few operations: each layer of a model makes them again."""
    masks = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,)
    queries = _tokens(masks[0], layout)
    return queries, queries if masks_of(attention_mask) == 1 else _tokens(masks[-1], layout)


def _tokens(mask: torch.Tensor, layout: str) -> Tokens:
    """mask: bool [b, 1, 1, s], True for padding."""
    hidden = mask.flatten()
    padded, rows = hidden.cumsum(0), torch.arange(1, hidden.shape[0] + 1, device=mask.device)
    tokens = rows - padded  # so far, this row included
    place = torch.where(hidden, padded + tokens[-1], tokens) - 1
    shape = (mask.shape[0], -1)
    place = place if layout == "bshd" else place.view(shape).t().flatten()
    cu_seqlens = torch.nn.functional.pad(tokens.view(shape)[:, -1], (1, 0)).int()
    return Tokens(torch.empty_like(place).scatter_(0, place, rows - 1), place, cu_seqlens)


class _Gather(torch.autograd.Function):
    """q, k and v [rows, heads, width] in the order of their tokens. Each row is taken once, so gradients are gathered
    too: nothing is summed. order_kv and place_kv are None where they are those of q."""

    @staticmethod
    def forward(ctx, order_q, place_q, order_kv, place_kv, q, k, v):
        ctx.save_for_backward(place_q, place_kv)
        order_kv = order_q if order_kv is None else order_kv
        return q.index_select(0, order_q), k.index_select(0, order_kv), v.index_select(0, order_kv)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        place_q, place_kv = ctx.saved_tensors
        place_kv = place_q if place_kv is None else place_kv
        return (
            None,
            None,
            None,
            None,
            *(
                t if t is None else t.index_select(0, place)
                for t, place in ((dq, place_q), (dk, place_kv), (dv, place_kv))
            ),
        )


class _Scatter(torch.autograd.Function):
    """The way back of the queries."""

    @staticmethod
    def forward(ctx, order, place, out):
        ctx.save_for_backward(order)
        return out.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad.index_select(0, *ctx.saved_tensors)


def _scatter(queries: Tokens, shape: tuple[int, int], out: torch.Tensor) -> torch.Tensor:
    return _Scatter.apply(queries.order, queries.place, out).unflatten(0, shape)
