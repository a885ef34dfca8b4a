# A CPU's stand-in for the two entries of PyTorch's flash attention that run on GPUs alone, by their contract, one
# sequence at a time: so the code around them is tested on every machine. Elements that it leaves open are NaN.
import contextlib

import torch

REPEATS = []  # for each backward: whether torch's kernel would repeat its bits


def _sequences(cum_q, cum_k, max_q, max_k):
    """Rows of the queries and keys of each sequence, as many as the bounds let the kernel visit, and the lengths."""
    for q0, q1, k0, k1 in zip(*(t.tolist() for t in (cum_q[:-1], cum_q[1:], cum_k[:-1], cum_k[1:])), strict=True):
        n_q, n_k = q1 - q0, k1 - k0
        assert not (n_q and n_k) or (n_q <= max_q and n_k <= max_k)
        yield slice(q0, q0 + min(n_q, max_q)), slice(k0, k0 + min(n_k, max_k)), n_k - n_q


def _batch_starts(t):
    return torch.arange(t.shape[0] + 1, dtype=torch.int32) * t.shape[1]


def _forward_of_any(q, k, v, cum_q, cum_k, *rest, **options):
    """A batch [b, s, h, d] as packed sequences; its lse is [b, h, s]."""
    if cum_q is not None:
        return _forward(q, k, v, cum_q, cum_k, *rest, **options)
    assert rest[:2] == (q.shape[1], k.shape[1])
    bounds = (_batch_starts(q), _batch_starts(k), max(rest[0], 2), max(rest[1], 2))
    out, lse, *others = _forward(*(t.flatten(0, 1) for t in (q, k, v)), *bounds, *rest[2:], **options)
    return torch.empty_like(q).copy_(out.view(q.shape)), lse.unflatten(1, q.shape[:2]).transpose(0, 1), *others


def _backward_of_any(dout, q, k, v, out, lse, cum_q, cum_k, *rest, **options):
    if cum_q is not None:
        return _backward(dout, q, k, v, out, lse, cum_q, cum_k, *rest, **options)
    assert rest[:2] == (q.shape[1], k.shape[1]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    bounds = (_batch_starts(q), _batch_starts(k), max(rest[0], 2), max(rest[1], 2))
    rows = [t.flatten(0, 1) for t in (dout, q, k, v, out)]
    made = _backward(*rows, lse.transpose(0, 1).flatten(1), *bounds, *rest[2:], **options)
    return tuple(torch.empty_like(t).copy_(g.view(t.shape)) for t, g in zip((q, k, v), made, strict=True))


def _check(max_q, dropout, *tensors):
    assert max_q > 1 and dropout == 0.0 and len({t.shape[-1] for t in tensors}) == 1
    for t in tensors:
        assert t.shape[-1] % 8 == 0 and t.shape[-1] <= 256 and t.data_ptr() % 16 == 0 and t.stride(-1) == 1
        assert t.dtype in (torch.float16, torch.bfloat16) and all(n % 8 == 0 for n in t.stride()[:-1])


def _scores(q, k, ahead, scale, causal, left, right, max_k):
    """[h, n, m] with -inf where hidden; q [n, h, d], k [m, g, d]."""
    left, right = (-1 if n is None or n >= max_k else n for n in (left, right))
    right = 0 if causal else max_k if left >= 0 and right < 0 else right
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    distance = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - ahead
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen & (distance <= right) if right >= 0 else seen
    seen = seen & (distance >= -left) if left >= 0 else seen
    return s.masked_fill(~seen, -torch.inf)


def _forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, alibi_slopes=None
):  # fmt: skip
    _check(max_q, dropout, q, k, v)
    out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan, dtype=torch.float32)
    for rows, keys, ahead in _sequences(cum_q, cum_k, max_q, max_k):
        if rows.start == rows.stop:
            continue
        s = _scores(q[rows], k[keys], ahead, scale, causal, window_size_left, window_size_right, max_k)
        total = s.logsumexp(-1) if s.shape[-1] else torch.full(s.shape[:2], -torch.inf)
        values = v[keys].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        p = (s - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1)).exp()
        out[rows] = torch.einsum("hnm,mhd->nhd", p.to(v.dtype).float(), values).to(out.dtype)
        lse[:, rows] = total.masked_fill(total == -torch.inf, torch.inf)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None,
    window_size_left=None, window_size_right=None
):  # fmt: skip
    REPEATS.append(
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    _check(max_q, dropout, q, k, v, dout, out)
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    for rows, keys, ahead in _sequences(cum_q, cum_k, max_q, max_k):
        s = _scores(q[rows], k[keys], ahead, scale, causal, window_size_left, window_size_right, max_k)
        p = (s - lse[:, rows].unsqueeze(-1)).exp()
        d = dout[rows].float()
        delta = (d * out[rows].float()).sum(-1).t().unsqueeze(-1)
        wide_k, wide_v = (t[keys].float().repeat_interleave(shared, 1) for t in (k, v))
        ds = p * (torch.einsum("nhd,mhd->hnm", d, wide_v) - delta) * scale
        dq[rows] = torch.einsum("hnm,mhd->nhd", ds, wide_k).to(dq.dtype)
        sums = torch.einsum("hnm,nhd->mhd", ds, q[rows].float()), torch.einsum("hnm,nhd->mhd", p, d)
        for of, total in zip((dk, dv), sums, strict=True):
            of[keys] = total.unflatten(1, (groups, shared)).sum(2).to(of.dtype)
    return dq, dk, dv


@contextlib.contextmanager
def flash_on_the_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward_of_any, "CPU")
    library.impl("_flash_attention_backward", _backward_of_any, "CPU")
    try:
        yield
    finally:
        library._destroy()
