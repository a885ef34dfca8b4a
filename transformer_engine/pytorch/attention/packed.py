"""Packed inputs of attention: q, k and v in one tensor, and sequences one after another (thd), which those of a batch
can be too. Checks and views."""

import torch

from transformer_engine.pytorch._internal.arguments import check_size, check_tensor

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


# ---- a batch as packed sequences with padding between them ----


def in_rows(t: torch.Tensor, layout: str) -> torch.Tensor:
    """t [b, s, heads, d] or [s, b, heads, d] as [b s, heads, d]."""
    return (t if layout == "bshd" else t.transpose(0, 1)).flatten(0, 1)


def from_rows(t: torch.Tensor, layout: str, seq: int) -> torch.Tensor:
    t = t.unflatten(0, (-1, seq))
    return t if layout == "bshd" else t.transpose(0, 1).contiguous()


def rows_of_batch(cu_seqlens: Pair, seqs: tuple[int, int]) -> dict[str, torch.Tensor | int]:
    """The arguments of functional.attention for sequences that begin at every multiple of these lengths."""
    rows, starts = {}, None
    for i, side in enumerate(("q", "kv")):
        if i == 0 or seqs[0] != seqs[1]:
            ends = seqs[i] * len(cu_seqlens[i])
            starts = torch.arange(0, ends, seqs[i], dtype=torch.int32, device=cu_seqlens[i].device)
        rows[f"cu_seqlens_{side}"], rows[f"cu_seqlens_{side}_padded"] = cu_seqlens[i], starts
        rows[f"max_seqlen_{side}"] = seqs[i]
    return rows
