"""Rotary position embedding: the angles as a module, and their application, to packed sequences (thd) and to one rank's
chunks of sequences too."""

import warnings
from collections.abc import Sequence

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch._internal.torch_private import assert_async
from transformer_engine.pytorch.module.base import refuse
from transformer_engine.pytorch.tensor.engine import is_plain
from transformer_engine.pytorch.utils import resolve_device


class RotaryPositionEmbedding(torch.nn.Module):
    """The angles position * rotary_base^(-2i / dim), for apply_rotary_pos_emb and MultiheadAttention.

    dim: head_dim, of which the first dim * rotary_percent are rotated.
    seq_len_interpolation_factor, pretrained_max_position_embeddings: only together; positions are divided by the
        factor, and if a sequence is longer than the product of both, by max_seq_len / the second one instead.
    interleaved: each angle is repeated in place (pairs are neighbours), otherwise the row of angles is repeated.
    inv_freq, a buffer, may be assigned or loaded: a model's scaled frequencies. Moves keep its values, in float32
    whatever the model is cast to; on the meta device, and after to_empty(), the formula gives them.
    """

    @check_keywords()
    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ):
        super().__init__()
        self.rot_dim = int(dim * rotary_percent)
        if not 0.0 < rotary_percent <= 1.0 or self.rot_dim % 2 != 0:
            raise ValueError(
                f"RotaryPositionEmbedding: arguments 'dim' and 'rotary_percent' are {dim} and {rotary_percent}, wanted "
                "a percentage in (0, 1] and an even number of rotated elements."
            )
        if seq_len_interpolation_factor is not None and not seq_len_interpolation_factor > 0:
            raise ValueError(
                "RotaryPositionEmbedding: argument 'seq_len_interpolation_factor' is "
                f"{seq_len_interpolation_factor}, wanted a number > 0."
            )
        if seq_len_interpolation_factor is not None and pretrained_max_position_embeddings is None:
            warnings.warn(
                "RotaryPositionEmbedding: argument 'seq_len_interpolation_factor' has no effect without "
                "'pretrained_max_position_embeddings'; pass both, or neither.",
                UserWarning,
                stacklevel=3,  # past check_keywords
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._inverse_frequencies(resolve_device(None)))

    def _inverse_frequencies(self, device: torch.device) -> torch.Tensor:
        exponent = torch.arange(0, self.rot_dim, 2, dtype=torch.float32, device=device) / self.rot_dim
        return 1.0 / self.rotary_base**exponent

    def _apply(self, fn, recurse=True):
        before = self.inv_freq
        super()._apply(fn, recurse)
        moved = self.inv_freq
        if moved is before or moved.is_meta:
            return self
        # .to(bfloat16) would misplace positions, .to_empty() leaves uninitialised memory.
        values = self._inverse_frequencies(moved.device) if before.is_meta else before
        self.inv_freq = moved.copy_(values) if moved.dtype is torch.float32 else values.to(moved.device, torch.float32)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of the positions offset .. offset + max_seq_len - 1: float32 [max_seq_len, 1, 1, dim]."""
        try:
            positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        except TypeError:
            raise TypeError(
                f"RotaryPositionEmbedding: arguments 'max_seq_len' and 'offset' are a {type(max_seq_len).__name__} and "
                f"a {type(offset).__name__}, wanted numbers of positions: x.shape[0] of an sbhd tensor."
            ) from None
        factor, learned = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and learned is not None:
            beyond = max_seq_len > learned * factor
            positions = positions / (max_seq_len / learned if beyond else factor)
        angles = positions[:, None] * self.inv_freq
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


def _check_layout(op: str, tensor_format: str, cu_seqlens: torch.Tensor | None, packed: bool) -> None:
    formats = ("sbhd", "bshd", "thd") if packed else ("sbhd", "bshd")
    if tensor_format == "thd" and not packed:
        refuse(op, "rotary embedding of packed sequences", tensor_format=tensor_format)
    if tensor_format not in formats:
        raise ValueError(f"{op}: argument 'tensor_format' is {tensor_format!r}, wanted one of {formats}.")
    if tensor_format != "thd":
        if cu_seqlens is not None:
            raise ValueError(f"{op}: argument 'cu_seqlens' is given, wanted None in {tensor_format}.")
        return
    fits = type(cu_seqlens) is torch.Tensor and cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0
    if not fits or cu_seqlens.dtype != torch.int32:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
        raise ValueError(f"{op}: argument 'cu_seqlens' is {got}, wanted int32 [sequences + 1] in thd.")


def _check_sequences(op: str, cu_seqlens: torch.Tensor, tokens: int, cp_size: int) -> None:
    """The values: at once on a CPU; on a GPU by an assertion there, for which the host does not wait."""
    if not is_plain(cu_seqlens):
        return
    lengths, chunks = cu_seqlens.diff(), 2 * cp_size
    fits = (lengths >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= tokens * cp_size)
    wanted = f"wanted 0 first and then each sequence's length added, up to the {tokens * cp_size} tokens"
    if cp_size > 1:
        fits &= (lengths % chunks == 0).all()
        wanted += f" over {cp_size} ranks, with lengths that are multiples of {chunks}"
    if not cu_seqlens.is_cpu:
        assert_async(fits, f"{op}: argument 'cu_seqlens' does not fit: {wanted}")
    elif not fits:
        raise ValueError(f"{op}: argument 'cu_seqlens' is {cu_seqlens.tolist()}, {wanted}.")


def _check_starts(op: str, start_positions: torch.Tensor | None, count: int, of: str) -> None:
    if start_positions is None:
        return
    if type(start_positions) is not torch.Tensor:
        check_tensor(op, "start_positions", start_positions)
    if start_positions.shape == (count,) and start_positions.dtype in (torch.int32, torch.int64):
        return
    raise ValueError(
        f"{op}: argument 'start_positions' is {start_positions.dtype} {list(start_positions.shape)}, wanted int32 "
        f"[{count}], one for each {of}."
    )


def _check_rank(op: str, cp_size: int, cp_rank: int, start_positions: torch.Tensor | None) -> None:
    check_size(op, "cp_size", cp_size, 1)
    check_size(op, "cp_rank", cp_rank)
    if cp_rank >= cp_size:
        raise ValueError(f"{op}: argument 'cp_rank' is {cp_rank}, wanted one below cp_size {cp_size}.")
    if cp_size > 1 and start_positions is not None:
        raise NotImplementedError(
            f"{op}: argument 'start_positions' is given and 'cp_size' is {cp_size}, which exclude each other in this "
            "version; leave one at its default."
        )


def _rows_of_rank(op: str, freqs: torch.Tensor, seq: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The angles of a rank's chunks cp_rank and 2 cp_size - 1 - cp_rank of each sequence, which has seq tokens here."""
    if cp_size == 1:
        return freqs
    half = seq // 2
    if seq % 2:
        raise ValueError(f"{op}: the input has {seq} tokens of each sequence, wanted two chunks of one length.")
    if freqs.size(0) < seq * cp_size:
        got = f"wanted at least {seq * cp_size}, the tokens over {cp_size} ranks"
        raise _past_the_table(op, freqs.size(0), got)
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([freqs.narrow(0, chunk * half, half) for chunk in chunks])


def packed_positions(
    cu_seqlens: torch.Tensor,
    tokens: int,
    *,
    lengths: torch.Tensor | None = None,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """int32 [tokens]: the place of each token in its sequence, found on the device. cu_seqlens: where the sequences
    begin, of the whole ones where cp_size ranks have two chunks of each. Padding has the position 0: tokens before
    the first sequence and after the last one and, if lengths (cumulative, without padding) are given, those between
    sequences."""
    starts, sequences = cu_seqlens // cp_size, cu_seqlens.size(0) - 1
    own = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    if sequences == 0:
        return torch.zeros_like(own)
    sequence = (torch.searchsorted(starts, own, right=True) - 1).clamp(0, sequences - 1)
    place, padding = own - starts[sequence], own >= starts[-1]
    padding = padding | (place < 0)  # before the first sequence
    if lengths is not None:
        padding = padding | (place >= lengths.diff()[sequence])
    if cp_size > 1:
        half = (starts.diff() // 2)[sequence]
        first, second = cp_rank * half + place, (2 * cp_size - 2 - cp_rank) * half + place
        place = torch.where(place < half, first, second)
    if start_positions is not None:
        place = place + start_positions[sequence]
    return place.masked_fill(padding, 0).int()


def _check_positions(op: str, positions: torch.Tensor, freqs: torch.Tensor) -> None:
    """On a GPU the host does not wait: a position past the angles gives NaN."""
    if positions.is_cpu and is_plain(positions) and positions.numel() and positions.max() >= freqs.size(0):
        raise _past_the_table(op, freqs.size(0), f"wanted at least the longest sequence, {int(positions.max()) + 1}")


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _check_tensors(op: str, **tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        if type(t) is not torch.Tensor:
            check_tensor(op, name, t)


def _past_the_table(op: str, positions: int, got: str) -> ValueError:
    return ValueError(
        f"{op}: argument 'freqs' has {positions} positions, {got}: pass RotaryPositionEmbedding(dim)(n) with n of them."
    )


def _unfused(
    t: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    batch_first: bool,
    interleaved: bool,
) -> torch.Tensor:
    """torch's own operations, in float32 and rounded once; differentiable any number of times."""
    op = "apply_rotary_pos_emb"
    seq = t.size(1 if batch_first else 0)
    angles = freqs.float().flatten(1)  # [positions, rot_dim]
    rows = angles.size(0)
    if seq > rows:
        raise _past_the_table(op, rows, f"wanted at least the sequence length {seq}")
    if start_positions is None:
        angles = angles[:seq, None]  # [seq, 1, rot_dim]
    else:
        positions = torch.arange(seq, device=t.device)[:, None] + start_positions
        inside = (positions >= 0) & (positions < rows)
        if positions.is_cpu and is_plain(positions) and not inside.all():
            got = f"wanted those from start_positions {start_positions.tolist()} on, {seq} each"
            raise _past_the_table(op, rows, got)
        # On a GPU the host does not wait for a check: NaN, as in the fused form.
        angles = angles[positions.clamp(0, max(rows - 1, 0))].masked_fill(~inside[..., None], torch.nan)
    if batch_first:
        angles = angles.transpose(0, 1)
    angles = angles.unsqueeze(2)
    rotated, rest = t[..., : freqs.size(-1)].float(), t[..., freqs.size(-1) :]
    rotated = rotated * angles.cos() + _rotate_half(rotated, interleaved) * angles.sin()
    return torch.cat((rotated.to(t.dtype), rest), dim=-1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """t cos(freqs) + rotate_half(t) sin(freqs) on t's first freqs.size(-1) columns; the others pass through.

    Shapes: t [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or [t, h, d] (thd); freqs [>= s, 1, 1, d2] with d2 <= d, from
    RotaryPositionEmbedding; start_positions int32 [b], added to the index in the sequence. thd: cu_seqlens int32
    [b + 1], the rows where the sequences begin (the padded ones where there is padding).
    cp_size > 1: t has chunks cp_rank and 2 cp_size - 1 - cp_rank of the 2 cp_size of each sequence; cu_seqlens are
    those of the whole sequences.
    fused: one kernel (functional.rope); otherwise torch's operations, which also give freqs a gradient.
    Errors: TypeError unless they are tensors; ValueError for positions past the angles (on a GPU NaN if
    start_positions or cu_seqlens lead there), for thd without cu_seqlens and the other way round; NotImplementedError
    for start_positions with cp_size > 1.
    """
    op = "apply_rotary_pos_emb"
    _check_layout(op, tensor_format, cu_seqlens, packed=True)
    _check_rank(op, cp_size, cp_rank, start_positions)
    _check_tensors(op, t=t, freqs=freqs)
    if tensor_format == "thd":
        _check_sequences(op, cu_seqlens, t.size(0), cp_size)
        _check_starts(op, start_positions, cu_seqlens.shape[0] - 1, "sequence")
        # each token as a batch of one, which begins at its position
        positions = packed_positions(
            cu_seqlens, t.size(0), start_positions=start_positions, cp_size=cp_size, cp_rank=cp_rank
        )
        _check_positions(op, positions, freqs)
        options = {"fused": fused, "start_positions": positions, "interleaved": interleaved}
        return apply_rotary_pos_emb(t.unsqueeze(1), freqs, "bshd", **options).squeeze(1)
    _check_starts(op, start_positions, t.size(1 if tensor_format == "sbhd" else 0), "sequence of the batch")
    freqs = _rows_of_rank(op, freqs, t.size(0 if tensor_format == "sbhd" else 1), cp_size, cp_rank)
    if not fused:
        return _unfused(t, freqs, start_positions, tensor_format == "bshd", interleaved)
    (out,) = functional.rope(
        t, freqs=freqs, start_positions=start_positions, tensor_format=tensor_format, interleaved=interleaved
    )
    return out


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a packed projection, q and k rotated, in one pass forward and one backward.

    Shapes: qkv [s, b, h, dq + dk + dv] (bshd: batch first) with qkv_split_arg_list = [dq, dk, dv], where head_dim = dk
    divides dq and dv -> q [s, b, h * dq / dk, dk], k [s, b, h, dk], v [s, b, h * dv / dk, dk].
    Errors: ValueError for a split that does not fit; NotImplementedError for thd; the rest as apply_rotary_pos_emb.
    """
    op = "apply_fused_qkv_rotary_pos_emb"
    _check_layout(op, tensor_format, cu_seqlens, packed=False)
    _check_rank(op, cp_size, cp_rank, start_positions)
    _check_tensors(op, qkv=qkv, q_freqs=q_freqs, k_freqs=k_freqs)
    seq = qkv.size(0 if tensor_format == "sbhd" else 1)
    q_freqs, k_freqs = (_rows_of_rank(op, freqs, seq, cp_size, cp_rank) for freqs in (q_freqs, k_freqs))
    split = list(qkv_split_arg_list)
    head = split[1] if len(split) == 3 else 0
    if head <= 0 or sum(split) != qkv.size(-1) or split[0] % head or split[2] % head:
        raise ValueError(
            f"{op}: argument 'qkv_split_arg_list' is {split} for qkv of shape {tuple(qkv.shape)}, wanted three sizes "
            f"that add up to {qkv.size(-1)}, the first and the last multiples of the second."
        )
    return functional.rope_qkv(
        qkv,
        heads=[width // head for width in split],
        q_freqs=q_freqs,
        k_freqs=k_freqs,
        start_positions=start_positions,
        tensor_format=tensor_format,
        interleaved=interleaved,
    )


def apply_rotary_to_packed(
    qkv: torch.Tensor,
    rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    heads: tuple[int, int],
    groups: int = 1,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    start_positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As apply_fused_qkv_rotary_pos_emb, for a projection whose last dimension is [q | k | v] of each group in turn;
    one group is [all of q | all of k | all of v].

    Shapes: qkv [s, b, (nq + 2 nk) * head_dim] (bshd: batch first) with heads = (nq, nk), both multiples of groups, ->
    q [s, b, nq, head_dim], k and v [s, b, nk, head_dim]. rotary_pos_emb: the angles, or a pair of them for q and k.
    """
    q_freqs, k_freqs = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, None)
    return functional.rope_qkv(
        qkv.unflatten(2, (groups, qkv.shape[2] // groups)),
        heads=(heads[0] // groups, heads[1] // groups, heads[1] // groups),
        q_freqs=q_freqs,
        k_freqs=k_freqs,
        start_positions=start_positions,
        tensor_format=tensor_format,
        interleaved=interleaved,
    )


def apply_rotary_to_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    start_positions: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated, of sequences that may differ in length; the angles, or a pair of them for q and k."""
    angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
    layout = {"tensor_format": tensor_format, "interleaved": interleaved}
    query, key = (
        functional.rope(t, freqs=freqs, start_positions=start, **layout)[0]
        for t, freqs, start in zip((query, key), angles, start_positions, strict=True)
    )
    return query, key
