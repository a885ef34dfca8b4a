# Packed sequences and their float64 reference, written plainly: one sequence, one head and one query at a time. No test
# is here, and nothing of the library.
import torch
from support import wide

BLOCK = 512  # keys of a block of chunked attention; lengths around it and above it


class Packed:
    """Lengths of queries and keys as the tensors of a call, the same ones for both where the lengths are; gap: rows of
    padding after each sequence and at the end; tail: further rows at the end."""

    def __init__(self, lengths_q, lengths_kv=None, *, gap=0, tail=0):
        self.lengths = (lengths_q, lengths_q if lengths_kv is None else lengths_kv)
        self.starts = tuple([sum(n[:i]) + gap * i for i in range(len(n) + 1)] for n in self.lengths)
        self.rows = tuple(starts[-1] + gap + tail for starts in self.starts)
        self.gap = gap

    def arguments(self, device, *, bounds=False):
        given = {}
        for side, lengths, starts in zip(("q", "kv"), self.lengths, self.starts, strict=True):
            sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            given[f"cu_seqlens_{side}"] = torch.tensor(sums, dtype=torch.int32, device=device)
            if self.gap:
                given[f"cu_seqlens_{side}_padded"] = torch.tensor(starts, dtype=torch.int32, device=device)
            if bounds:
                given[f"max_seqlen_{side}"] = max(lengths, default=0) + 3
        if self.lengths[0] is self.lengths[1]:
            given |= {name.replace("_q", "_kv"): t for name, t in given.items() if "_q" in name}
        return given

    def sequences(self, side):
        return [slice(start, start + n) for start, n in zip(self.starts[side], self.lengths[side])]

    def padding(self, side):
        """bool [rows], True for padding."""
        padding = torch.ones(self.rows[side], dtype=torch.bool)
        for rows in self.sequences(side):
            padding[rows] = False
        return padding

    def tensors(self, heads, groups, d_qk, d_v, dtype, device, fill=0.0):
        """q, k and v with `fill` in the padding."""
        made = []
        for side, count, width in ((0, heads, d_qk), (1, groups, d_qk), (1, groups, d_v)):
            t = torch.randn(self.rows[side], count, width)
            t[self.padding(side)] = fill
            made.append(t.to(device, dtype))
        return made


def batch_inputs(device, dtype, *, seqs=(70, 70), heads=(4, 2), dims=(64, 64), batch=2, layout="bshd"):
    """q, k and v of a batch."""
    made = []
    for seq, count, width in ((seqs[0], heads[0], dims[0]), (seqs[1], heads[1], dims[0]), (seqs[1], heads[1], dims[1])):
        shape = (batch, seq) if layout == "bshd" else (seq, batch)
        made.append(torch.randn(*shape, count, width).to(device, dtype))
    return made


def visible(n_q, n_kv, mask, window):
    """bool [n_q, n_kv]."""
    left, right = window
    right = 0 if "causal" in mask else right
    ends = mask.endswith("bottom_right") or "causal" not in mask
    ahead = torch.arange(n_kv) - torch.arange(n_q)[:, None] - (n_kv - n_q if ends else 0)
    seen = torch.ones(n_q, n_kv, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    return seen & (ahead <= right) if right >= 0 else seen, ahead


def reference(q, k, v, packed, *, mask="padding", window=(-1, -1), scale=None, softcap=0.0, slopes=None, sink=None):
    """out [rows of q, heads * d_v] in float64, and the largest seen score of each head."""
    q, k, v, slopes, sink = (t if t is None else t.cpu().double() for t in (q, k, v, slopes, sink))
    scale, heads, groups = scale or q.shape[-1] ** -0.5, q.shape[1], k.shape[1]
    out = [q.new_zeros(q.shape[0], v.shape[-1]) + 0 * q.sum() for _ in range(heads)]
    most = [-torch.inf] * heads
    for rows, keys in zip(packed.sequences(0), packed.sequences(1)):
        n_q, n_kv = rows.stop - rows.start, keys.stop - keys.start
        seen, ahead = visible(n_q, n_kv, mask, window)
        for h in range(heads):
            group = h // (heads // groups)
            s = scale * (q[rows, h] @ k[keys, group].T)
            s = softcap * torch.tanh(s / softcap) if softcap else s
            s = s if slopes is None else s - slopes[h] * ahead.abs()
            s = torch.where(seen, s, -torch.inf)
            if n_q and n_kv and seen.any():
                most[h] = max(most[h], s.detach().max().item())
            blind = ~seen.any(-1, keepdim=True)
            shift = torch.where(blind, 0.0, s.detach().amax(-1, keepdim=True)) if n_kv else torch.zeros(n_q, 1).double()
            p = torch.exp(s - shift)
            total = p.sum(-1, keepdim=True)
            if sink is not None:
                total = total + torch.exp(sink[h] - shift)
            context = p @ v[keys, group] / torch.where(total == 0, 1.0, total)
            out[h] = out[h].index_put((torch.arange(rows.start, rows.stop),), context)
    return torch.cat(out, -1), torch.tensor(most, dtype=torch.float64)


def gradients(call, tensors):
    """[out, gradients of tensors..] of call(*tensors), in which the same cotangent arrives."""
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*inputs)
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator).bfloat16().to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent, allow_unused=True, materialize_grads=True)]


def check_close(got, exact, dtype, what="", rounded=None, factor=1):
    """Each result within the roundings of its dtype: scores, softmax and context are three products in a row in float32
    (float64), each a sum of at most 2 * BLOCK terms of which errors add up as a root; the result is rounded once, and
    in 16 bits so is out, from which the backward takes delta. rounded: the dtype of what went in, if another; factor:
    of these errors, where a kernel rounds more often."""
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 4 * torch.finfo(rounded or dtype).eps
    largest = max((wide(t).abs().max().item() for t in exact if t.numel()), default=0.0)
    for i, (ours, wanted) in enumerate(zip(got, exact, strict=True)):
        assert ours.dtype == dtype and ours.isfinite().all(), f"{what} {i}"
        if wanted.numel() == 0:
            continue
        top = wide(wanted).abs().max().item()
        top = largest if top < 1e-12 * largest else top  # zero by symmetry, as the scores' gradient with one key is
        limit = factor * (rounding + 3 * (2 * BLOCK) ** 0.5 * unit) * top
        error = (wide(ours) - wide(wanted)).abs().max().item()
        assert error <= limit, f"{what} {i}: {error:.3g} from float64, wanted {limit:.3g}"
