"""The keys that a query sees: mask names, windows, padding and biases as one pattern, and that pattern as tensors. It
checks arguments and computes no attention. No function here waits for the device."""

import operator
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import NamedTuple

import torch

from transformer_engine.pytorch.constants import AttnBiasTypes, AttnMaskTypes
from transformer_engine.pytorch.module.base import check_choice
from transformer_engine.pytorch.tensor.engine import is_plain

Window = tuple[int, int] | None
AttentionMask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Pattern(NamedTuple):
    """Query i sees key j when diagonal - left <= j <= diagonal + right, the diagonal being i, or with bottom_right
    i + (number of keys) - (number of queries); -1 is no limit. padding and arbitrary hide further keys."""

    left: int
    right: int
    bottom_right: bool
    padding: bool
    arbitrary: bool

    def within(self, seq_q: int | None, seq_kv: int | None) -> "Pattern":
        """The same pattern without limits and alignment that have no effect on sequences of these lengths.
        None: lengths that are equal, and longer than every window."""
        if not self.positional:
            return self
        left, right, bottom_right = self.left, self.right, self.bottom_right
        if seq_q == seq_kv and not self.padding:  # padded sequences have lengths of their own
            bottom_right = False
        if seq_q is not None and (left > 0 or right > 0):
            farthest = max(seq_q, seq_kv) - 1
            left = -1 if left >= farthest else left
            right = -1 if right >= farthest else right
        return Pattern(left, right, bottom_right, self.padding, self.arbitrary)  # faster than _replace

    @property
    def positional(self) -> bool:
        return self.left >= 0 or self.right >= 0

    @property
    def top_left_causal(self) -> bool:
        if self.left != -1 or self.right != 0:  # a branch: torch.compile may hold windows as symbols
            return False
        return not self.bottom_right


def check_mask(op: str, mask: str, argument: str = "attn_mask_type") -> None:
    check_choice(op, argument, mask, AttnMaskTypes)


def check_window(op: str, window_size: Window, argument: str = "window_size") -> None:
    if window_size is None:
        return
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(isinstance(n, bool) or not isinstance(n, (int, Integral)) or n < -1 for n in window_size):
        raise ValueError(
            f"{op}: argument '{argument}' is {window_size!r}, wanted None or (left, right): how many keys before and "
            "after the diagonal a query sees, -1 for all of them."
        )


def pattern_of(mask: str, window_size: Window, bottom_right_diagonal: bool | None) -> Pattern:
    """A causal mask cuts a window's right side to 0, and its name defines the end of its diagonal; for the other masks
    bottom_right_diagonal defines it, and None means the bottom right."""
    left, right = (-1, -1) if window_size is None else (operator.index(n) for n in window_size)
    bottom_right = bottom_right_diagonal is None or bottom_right_diagonal
    if "causal" in mask:
        right, bottom_right = 0, mask.endswith("bottom_right")
    return Pattern(left, right, bottom_right, "padding" in mask, mask == "arbitrary")


# ---- shapes of the masks' tensors ----


class Sizes(NamedTuple):
    """The sizes of the queries and keys in `layout`."""

    batch: int
    seqs: tuple[int, int]
    device: torch.device
    layout: str

    def swapped(self) -> "Sizes":
        """The sizes of the same tensors in the other layout, whose sequences have one length."""
        return self._replace(batch=self.seqs[0], seqs=(self.batch, self.batch))


def swapped_advice(layout: str) -> str:
    """Advice for an argument that fits only the other layout."""
    first, other = ("batch", "bshd") if layout == "sbhd" else ("sequence", "sbhd")
    return (
        f"it fits an input that is {first} first: build the layer with {other!r} (qkv_format; attn_input_format of a "
        "TransformerLayer), or pass transpose(0, 1)."
    )


# The sizes that fit, for each dimension.
Shapes = tuple[tuple[int, ...], ...]


def _fits(t: torch.Tensor, shapes: Shapes) -> bool:
    # == and not `in`, which torch.compile does not support for dynamic sizes.
    return t.dim() == len(shapes) and all(
        any(n == option for option in options) for n, options in zip(t.shape, shapes, strict=True)
    )


def _check_tensor(
    op: str,
    name: str,
    t: object,
    shapes_of: Callable[[Sizes], Shapes],
    sizes: Sizes,
    dtype: torch.dtype | None,
    hint: str,
) -> None:
    """dtype None: any floating point."""
    shapes = shapes_of(sizes)
    if isinstance(t, torch.Tensor):
        right_type = t.is_floating_point() if dtype is None else t.dtype == dtype
        if _fits(t, shapes) and right_type and t.device == sizes.device:
            return
        if sizes.layout != "thd" and sizes.seqs[0] == sizes.seqs[1] and _fits(t, shapes_of(sizes.swapped())):
            hint = swapped_advice(sizes.layout)
    got = f"{t.dtype} {list(t.shape)} on {t.device}" if isinstance(t, torch.Tensor) else repr(t)
    kind = "floating point" if dtype is None else str(dtype)
    wanted = ", ".join(" or ".join(str(n) for n in dict.fromkeys(options)) for options in shapes)
    raise ValueError(f"{op}: argument '{name}' is {got}, wanted {kind} [{wanted}] on {sizes.device}; {hint}")


def check_padding(
    op: str,
    attention_mask: AttentionMask,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    sizes: Sizes,
) -> None:
    """Padding is given by masks or, without one, by cumulative lengths; masks take precedence."""
    if attention_mask is None:
        for name, lengths, seq in zip(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens, sizes.seqs, strict=True):
            hint = "a padding mask needs attention_mask, or both cu_seqlens_q and cu_seqlens_kv."
            _check_tensor(op, name, lengths, lambda of: ((of.batch + 1,),), sizes, torch.int32, hint)
            if lengths.is_cpu and is_plain(lengths):  # on a GPU it would be a sync
                _check_lengths(op, name, lengths, seq)
        return
    hint = "True where padded; for queries and keys of different lengths or paddings a tuple of two."
    masks = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,)
    if len(masks) not in (1, 2):
        raise ValueError(f"{op}: argument 'attention_mask' has {len(masks)} masks, wanted one or two (queries, keys).")
    for i in range(2):
        name = "attention_mask" if len(masks) == 1 else f"attention_mask[{i}]"
        shapes_of = partial(_shapes_of_padding, which=i)
        _check_tensor(op, name, masks[i % len(masks)], shapes_of, sizes, torch.bool, hint)


def _check_lengths(op: str, name: str, cumulative: torch.Tensor, seq: int) -> None:
    lengths = cumulative.diff()
    if cumulative[0] != 0 or not ((lengths >= 0) & (lengths <= seq)).all():
        raise ValueError(
            f"{op}: argument '{name}' is {cumulative.tolist()}, wanted 0 first and then each sequence's length added, "
            f"from 0 to the {seq} tokens of the input."
        )


def _shapes_of_padding(sizes: Sizes, which: int) -> Shapes:
    return ((sizes.batch,), (1,), (1,), (sizes.seqs[which],))


def _shapes_of_scores(sizes: Sizes, heads: int) -> Shapes:
    return ((1, sizes.batch), (1, heads), (1, sizes.seqs[0]), (sizes.seqs[1],))


def check_arbitrary(op: str, attention_mask: AttentionMask, sizes: Sizes, *, heads: int) -> None:
    hint = "True where a score is masked out."
    shapes_of = partial(_shapes_of_scores, heads=heads)
    _check_tensor(op, "attention_mask", attention_mask, shapes_of, sizes, torch.bool, hint)


def check_bias(
    op: str,
    kind: str,
    sizes: Sizes,
    *,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
    heads: int,
) -> None:
    check_choice(op, "core_attention_bias_type", kind, AttnBiasTypes)
    if kind in ("no_bias", "alibi"):
        if bias is not None:
            raise ValueError(
                f"{op}: argument 'core_attention_bias' is given, but 'core_attention_bias_type' is {kind!r}, which "
                "takes none; wanted 'pre_scale_bias' or 'post_scale_bias'."
            )
        if kind == "alibi" and slopes is not None:
            per_sequence = isinstance(slopes, torch.Tensor) and slopes.dim() == 2
            shapes_of = partial(_shapes_of_slopes, heads=heads, per_sequence=per_sequence)
            _check_tensor(op, "alibi_slopes", slopes, shapes_of, sizes, torch.float32, "one slope a head.")
        return
    shapes_of = partial(_shapes_of_scores, heads=heads)
    _check_tensor(op, "core_attention_bias", bias, shapes_of, sizes, None, f"{kind!r} adds it.")


def _shapes_of_slopes(sizes: Sizes, heads: int, per_sequence: bool) -> Shapes:
    return ((sizes.batch,), (heads,)) if per_sequence else ((heads,),)


# ---- the pattern as tensors ----


class Scores(NamedTuple):
    """attn_mask: for scaled_dot_product_attention, boolean (True is seen) or added, without a fully masked row.
    unseen: True for queries that see no key, or are padding; their results must be zeroed. None: there are none.
    padding: True for queries that are padding, and for keys, [b, 1, seq, 1] each; their values must be zeroed, because
    a product with them may overflow, and 0 times infinity is NaN in a backward. None: there is none."""

    attn_mask: torch.Tensor | None
    unseen: torch.Tensor | None
    padding: tuple[torch.Tensor, torch.Tensor] | None


def present_tokens(
    attention_mask: AttentionMask, cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None], seqs: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries and of keys: [b, seq], True for tokens. Arguments as checked by check_padding."""
    masks = attention_mask if isinstance(attention_mask, (tuple, list)) else (attention_mask,)
    pair = (masks[0], masks[-1])
    queries, keys = (_present(m, c, n) for m, c, n in zip(pair, cu_seqlens, seqs, strict=True))
    return queries, keys


def masks_of(attention_mask: AttentionMask) -> int:
    """The number of tensors that say which rows are padding; 0: cumulative lengths do."""
    if isinstance(attention_mask, (tuple, list)):
        return 1 if attention_mask[0] is attention_mask[-1] else 2
    return 0 if attention_mask is None else 1


def _present(mask: torch.Tensor | None, cumulative: torch.Tensor | None, seq: int) -> torch.Tensor:
    if mask is not None:
        return ~mask[:, 0, 0, :]
    lengths = cumulative[1:] - cumulative[:-1]
    return torch.arange(seq, device=cumulative.device) < lengths[:, None]


def default_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """2^(-8 i / n) for i = 1 .. n with n heads a power of two. Otherwise the slopes of the power of two below, then
    every other slope of the power of two above. Source: Press et al., Train Short, Test Long, 2022."""
    below = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, below + 1, device=device) * (-8.0 / below)
    further = (2 * torch.arange(heads - below, device=device) + 1) * (-4.0 / below)
    return torch.exp2(torch.cat((exponents, further)).float())


def build_scores(
    pattern: Pattern,
    *,
    batch: int,
    heads: int,
    seqs: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    scale: float,
    attention_mask: AttentionMask = None,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    bias_kind: str = "no_bias",
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> Scores:
    """One tensor for every pattern except a plain and a top-left causal mask: arguments as checked above.

    A query that sees no key is made to see all keys, and its result is zeroed: a softmax over no keys would be NaN, in
    the backward too, and the zero gradient that the zeroing returns changes no other gradient."""
    seq_q, seq_kv = seqs
    seen, padding, offset = [], None, seq_kv - seq_q
    if pattern.padding:
        queries, keys = present_tokens(attention_mask, cu_seqlens, seqs)
        padding = (~queries[:, None, :, None], ~keys[:, None, :, None])
        seen.append(keys[:, None, None, :])
        if pattern.bottom_right and (pattern.positional or bias_kind == "alibi"):
            offset = (keys.sum(-1) - queries.sum(-1))[:, None, None, None]
    rows = torch.arange(seq_q, device=device)[:, None] + (offset if pattern.bottom_right else 0)
    cols = torch.arange(seq_kv, device=device)
    if pattern.left >= 0:
        seen.append(cols >= rows - pattern.left)
    if pattern.right >= 0:
        seen.append(cols <= rows + pattern.right)
    if pattern.arbitrary:
        seen.append(~attention_mask)
    visible, unseen = None, None
    for part in seen:
        visible = part if visible is None else visible & part
    if pattern.padding or pattern.arbitrary or (visible is not None and seq_q > seq_kv):
        # Otherwise every query has the key of its diagonal.
        unseen = ~visible.any(-1, keepdim=True)
        visible = visible | unseen
        unseen = unseen if padding is None else unseen | padding[0]
    if bias_kind == "no_bias":
        # Complete rows, because cuDNN needs its additive mask like that.
        return Scores(visible.expand(*visible.shape[:-2], seq_q, seq_kv), unseen, padding)
    if bias_kind == "alibi":
        slopes = default_slopes(heads, device) if slopes is None else slopes
        bias = -(cols - rows).abs() * slopes.to(torch.promote_types(slopes.dtype, dtype)).reshape(-1, heads, 1, 1)
    elif bias_kind == "pre_scale_bias":
        bias = bias.to(torch.promote_types(bias.dtype, dtype)) * scale
    bias = bias.to(dtype)
    if visible is not None:
        bias = bias.masked_fill(~visible, -torch.inf)
    return Scores(bias.expand(*bias.shape[:-2], seq_q, seq_kv), unseen, padding)
