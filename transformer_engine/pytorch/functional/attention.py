"""Attention as a function that also returns the log-sum-exp of each row: dense or packed, with sinks and soft caps."""

import operator

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.arguments import check_number, check_size

_OF_GPUS = ("flash", "flash_deterministic", "cudnn", "efficient")


def _window(window: object) -> list[int]:
    try:
        left, right = (operator.index(n) for n in window)
    except (TypeError, ValueError):
        raise ValueError(
            f"attention: argument 'window' is {window!r}, wanted (left, right): numbers of keys, or -1 for all."
        ) from None
    return [left, right]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bshd",
    scale: float,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    mask: torch.Tensor | None = None,
    present_q: torch.Tensor | None = None,
    present_kv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bias: torch.Tensor | None = None,
    bias_scale: float = 1.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    kernel: str = "chunked",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logit) with s = scale q k^T, then softcap tanh(s / softcap), then + bias_scale bias
    - alibi_slopes |distance from the diagonal|; p = exp(s) / (exp(sink) + sum exp(s)), out = p v, lse the logarithm of
    that denominator. A query that sees no key gives 0.

    Shapes: q [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or [t, h, d] (thd), k and v alike with g heads, of which h is a
    multiple, v with its own head_dim; out as q with the head_dim of v; lse as q without head_dim; max_logit [h], the
    largest seen score, without the sink and without a gradient. window, bottom_right: keys before and after the
    diagonal that a query sees, -1 for all; where the diagonal ends. sink, alibi_slopes float32 [h], the slopes also
    [sequences, h].
    sbhd and bshd: present_q, present_kv bool [b, s], True for tokens; mask bool [1 or b, 1 or h, 1 or s, s_kv], True
    where masked out; bias likewise. thd: cu_seqlens_* int32 [sequences + 1], tokens of the sequences added up;
    cu_seqlens_*_padded the rows where they begin, if not there; max_seqlen_* bound the lengths. Other rows are padding:
    they may hold any finite value, their results and gradients are 0. A GPU checks the lengths on the device, and the
    host waits for them only where max_seqlen_* is None.
    kernel: 'chunked' takes every call on any device. 'flash' is PyTorch's flash attention on a GPU: float16 and
    bfloat16, head_dim up to 256, no masks, bias, slopes or softcap, scale > 0, with a window bottom_right (or as many
    queries as keys in a batch); its lse has no gradient, and max_logit is empty, [0]. 'flash_deterministic' is flash
    whose backward repeats its bits; for that time torch's deterministic algorithms are on in the process. 'cudnn'
    (float16, bfloat16, head_dim up to 128) and 'efficient' (float32 too) are PyTorch's kernels of these names for
    batches on a GPU: head_dim a multiple of 8 (4 in float32), at least 2 queries and 2 keys, windows (-1, -1) and
    (-1, 0), not bottom_right; the rest as flash, but their backwards do not repeat their bits.
    Dtypes: float64, float32, float16, bfloat16; computed in float32, float64 for float64, rounded once ('flash': it
    rounds probabilities and score gradients too, and repeats its bits under torch's deterministic algorithms).
    Saves q, k, v, out and lse: the backward computes blocks of scores again.
    Errors: ValueError naming the argument.
    """
    rows = [mask, present_q, present_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded]
    if kernel in _OF_GPUS and q.is_cpu:
        raise ValueError(
            f"attention: kernel {kernel!r} runs on a GPU, and argument 'q' is on cpu; use kernel='chunked'."
        )
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    for name, most in bounds.items():
        if most is not None:
            check_size("attention", name, most)
    pattern = [*_window(window), int(bottom_right), *(-1 if most is None else most for most in bounds.values())]
    given = {"scale": scale, "bias_scale": bias_scale, "softcap": softcap}
    scores = [check_number("attention", name, value) for name, value in given.items()]
    args = (q, k, v, bias, alibi_slopes, sink, rows, layout, kernel, pattern, scores)
    if torch.compiler.is_compiling():
        return torch.ops.te.attention(*args)
    return _C.attention(*args)
