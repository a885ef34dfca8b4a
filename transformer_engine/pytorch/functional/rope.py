"""Rotary position embedding as functions, on q and k or on a packed projection. Formula: transformer_engine/rope.h."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C

_FORMATS = ("sbhd", "bshd")


def _batch_first(tensor_format: str) -> bool:
    if tensor_format not in _FORMATS:
        raise ValueError(f"rope: argument 'tensor_format' is {tensor_format!r}, wanted one of {_FORMATS}.")
    return tensor_format == "bshd"


def _in_float32(angles: torch.Tensor | None) -> torch.Tensor | None:
    """Angles of other floats as float32, the dtype of the computation; other dtypes pass and are refused later."""
    if angles is None or angles.dtype is torch.float32 or not angles.is_floating_point():
        return angles
    return angles.float()


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None = None,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
) -> list[torch.Tensor]:
    """y = x cos(freqs) + rotate_half(x) sin(freqs) on q, and on k in the same launch: [y of q] or [y of q, y of k].

    Shapes: q [seq, batch, heads, head_dim] (sbhd) or [batch, seq, heads, head_dim] (bshd), any strides; k likewise,
    with its own number of heads. freqs [positions, 1, 1, rot_dim] or [positions, rot_dim]; columns from rot_dim on
    are copied. start_positions [batch], int32: added to the sequence index; a GPU does not check it, and a position
    beyond freqs gives NaN there. Returns new, contiguous tensors.
    Dtypes: q, k float32, float16, bfloat16; freqs of any float, taken as float32. Arithmetic in float32, one rounding.
    Saves: freqs and start_positions alone. freqs gets no gradient.
    Errors: ValueError naming the argument; NotImplementedError for freqs that require a gradient.
    """
    args = (q, k, _in_float32(freqs), start_positions, _batch_first(tensor_format), interleaved)
    if torch.compiler.is_compiling():
        return torch.ops.te.rope(*args)
    return _C.rope(*args)


def rope_qkv(
    qkv: torch.Tensor,
    *,
    heads: Sequence[int],
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor | None = None,
    start_positions: torch.Tensor | None = None,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The q, k and v of a packed projection in one pass: q and k rotated as in `rope`, v copied. The backward writes
    the packed gradient in one pass too.

    Shapes: qkv [seq, batch, groups, (nq + nk + nv) * head_dim] (sbhd; batch first for bshd) with heads = (nq, nk, nv)
    heads of q, k and v in each group -> q [seq, batch, groups * nq, head_dim], k and v likewise. k_freqs: q_freqs when
    None. The rest as in `rope`.
    """
    args = (
        qkv,
        _in_float32(q_freqs),
        _in_float32(k_freqs),
        start_positions,
        list(heads),
        _batch_first(tensor_format),
        interleaved,
    )
    if torch.compiler.is_compiling():
        return torch.ops.te.rope_qkv(*args)
    return _C.rope_qkv(*args)
