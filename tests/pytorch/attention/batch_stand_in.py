# A CPU's stand-ins for PyTorch's cuDNN and memory-efficient attention, which run on GPUs alone, by their contract: so
# the code around them is tested on every machine. Elements that they leave open are NaN.
import contextlib

import torch

EFFICIENT_ROWS = 32


def _check(*tensors):
    for t in tensors:
        unit = 16 // t.element_size()
        assert t.dim() == 4 and t.data_ptr() % 16 == 0 and t.stride(-1) == 1
        assert t.shape[-1] % unit == 0 and all(n % unit == 0 for n in t.stride()[:-1])
    q, k = tensors[:2]
    assert q.shape[2] > 1 and k.shape[2] > 1


def _probabilities(q, k, lse, causal, scale):
    """p [b, h, n, m] of the lse given, or with its own."""
    s = torch.einsum("bhnd,bhmd->bhnm", q.float(), k.float()) * scale
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    lse = s.logsumexp(-1) if lse is None else lse
    return (s - lse.unsqueeze(-1)).exp(), lse


def _like_query(q, width):
    """An empty result in the order of q in memory."""
    order = sorted(range(4), key=lambda dim: -q.stride(dim))
    shape = (*q.shape[:-1], width)
    return q.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _forward(q, k, v, causal, scale):
    _check(q, k, v)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    p, lse = _probabilities(q, k, None, causal, scale)
    return _like_query(q, v.shape[-1]).copy_((p.to(v.dtype).float() @ v.float()).to(q.dtype)), lse


def _backward(dout, q, k, v, out, lse, causal, scale):
    _check(q, k, v, dout, out)
    shared = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.float().repeat_interleave(shared, 1) for t in (k, v))
    p, _ = _probabilities(q, wide_k, lse, causal, scale)
    d = dout.float()
    ds = p * (d @ wide_v.transpose(-1, -2) - (d * out.float()).sum(-1, keepdim=True)) * scale
    grads = ds @ wide_k, ds.transpose(-1, -2) @ q.float(), p.transpose(-1, -2) @ d
    dk, dv = (g.unflatten(1, (-1, shared)).sum(2) for g in grads[1:])
    return tuple(torch.empty_like(t).copy_(g) for t, g in zip((q, k, v), (grads[0], dk, dv), strict=True))


def _cudnn(q, k, v, bias, keeps_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    assert bias is None and keeps_lse and dropout == 0.0 and q.dtype in (torch.float16, torch.bfloat16)
    out, lse = _forward(q, k, v, causal, scale)
    none, seed = torch.empty(0), torch.empty((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), none, none, q.shape[2], k.shape[2], seed, seed, none


def _cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale=None
):
    assert dropout == 0.0 and lse.shape == (*q.shape[:-1], 1) and lse.is_contiguous()
    # The plan that a forward in the order of q has left in torch's cache.
    planned = _like_query(q, v.shape[-1]).stride()
    for t in (out, dout):
        assert all(n == 1 or got == wanted for n, got, wanted in zip(t.shape, t.stride(), planned, strict=True))
    return _backward(dout, q, k, v, out, lse.squeeze(-1), causal, scale)


def _efficient(q, k, v, bias, keeps_lse, dropout=0.0, causal=False, *, scale=None):
    assert bias is None and keeps_lse and dropout == 0.0 and q.shape[1] == k.shape[1] and q.dtype != torch.float64
    out, lse = _forward(q, k, v, causal, scale)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // EFFICIENT_ROWS) * EFFICIENT_ROWS), torch.nan)
    padded[..., : lse.shape[2]] = lse
    return out, padded, torch.empty(0), torch.empty(0)


def _efficient_backward(dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    rows = q.shape[2]
    assert dropout == 0.0 and lse.shape[2] % EFFICIENT_ROWS == 0 and lse.shape[2] >= rows and lse.is_contiguous()
    assert list(wanted) == [True, True, True, False] and (lse[..., rows:] == torch.inf).all()
    assert out.transpose(1, 2).is_contiguous()  # the kernel computes the pitch of its rows by its shape
    return *_backward(dout, q, k, v, out, lse[..., :rows], causal, scale), torch.empty(0)


@contextlib.contextmanager
def batch_kernels_on_the_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", _cudnn, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", _cudnn_backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def inductor_as_on_a_gpu():
    """Inductor hands realized tensors of aligned strides to these kernels in the order that it has given them, as it
    does for tensors on a GPU; on a CPU it restores the traced order first."""
    from torch._inductor import ir, lowering

    def one(arg, traced):
        if not isinstance(arg, ir.IRNode) or len(arg.get_size()) not in (3, 4):
            return arg
        if ir.is_aligned_realized_tensor(arg, 8):
            return ir.ExternKernel.realize_input(arg)
        return ir.ExternKernel.require_stride_order(arg, ir.get_stride_order(traced.meta["val"].stride()))

    def constraint(node, *args, **options):
        read = tuple(one(arg, traced) for arg, traced in zip(args, node.args, strict=True))
        return read, {name: one(arg, node.kwargs[name]) for name, arg in options.items()}

    aten, rules = torch.ops.aten, lowering._maybe_layout_constraints
    names = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
    before = {op: rules[op] for op in (getattr(aten, name).default for name in names)}
    rules.update(dict.fromkeys(before, constraint))
    try:
        yield
    finally:
        rules.update(before)
