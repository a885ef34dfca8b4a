"""Packed inputs of attention: q, k and v in one tensor, and sequences one after another (thd). Checks and views."""

import torch

from transformer_engine.pytorch._internal.arguments import check_tensor

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


def check_packed(
    op: str,
    mask: str,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    max_seqlens: tuple[int | None, int | None],
    *,
    bias: str,
    dropout: float,
    on_cuda: bool,
) -> None:
    """The mask, lengths and options of a packed call; the op checks the values of the lengths."""
    if mask not in PACKED_MASKS:
        raise ValueError(f"{op}: argument 'attn_mask_type' is {mask!r}, wanted one of {PACKED_MASKS} in thd.")
    for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens, strict=True):
        if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1 or lengths.dtype != torch.int32:
            got = f"{lengths.dtype} {list(lengths.shape)}" if isinstance(lengths, torch.Tensor) else repr(lengths)
            raise ValueError(f"{op}: argument '{name}' is {got}, wanted int32 [sequences + 1] in thd.")
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
