"""Rotary embedding of q and k in one launch against plain PyTorch, eager and compiled (targets.py case 20).

Bytes per element of q and k of b bytes: 2b a pass (read, write); the angles are not counted. The peers get cosines and
sines made beforehand, in q's dtype. `_module` goes through autograd, forward and backward: 4b."""

import torch
from common import TORCH_DTYPES, Bench, Case

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C, functional

# seq, batch, q heads, k heads, head_dim
GPU_SHAPES = (("bf16", (8192, 2, 32, 8, 128)),)
CPU_SHAPES = (("fp32", (1024, 2, 8, 2, 64)), ("bf16", (1024, 2, 8, 2, 64)))


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def plain(q, k, cos, sin):
    return rotate(q, cos, sin), rotate(k, cos, sin)


def through_autograd(function):
    def step(q, k, dq, dk):
        q.grad = k.grad = None
        torch.autograd.backward(function(q, k), (dq, dk))

    return step


def run(bench, dtype, shape):
    seq, batch, q_heads, k_heads, head_dim = shape
    freqs = te.RotaryPositionEmbedding(head_dim).to(bench.device)(seq)
    cos, sin = freqs.cos().to(TORCH_DTYPES[dtype]), freqs.sin().to(TORCH_DTYPES[dtype])
    columns = (seq * batch, q_heads + k_heads, head_dim)
    one_pass = 2 * TORCH_DTYPES[dtype].itemsize * seq * batch * (q_heads + k_heads) * head_dim

    def inputs():
        return tuple(bench.randn(seq, batch, heads, head_dim, dtype=dtype) for heads in (q_heads, k_heads))

    def eager(q, k):
        return plain(q, k, cos, sin)

    def peers():
        return {"torch eager": eager} | bench.compiled(lambda: eager)

    case = Case("20", "rope", dtype, columns, "forward", bytes=one_pass)
    if bench.selects(case):
        ours = {"ours": lambda q, k: _C.rope_fwd(q, k, freqs, None, False, False, False)}
        bench.compare(case, ours | peers(), inputs)

    case = Case("20", "rope_module", dtype, columns, "forward+backward", bytes=2 * one_pass)
    if bench.selects(case):
        contenders = {"ours": lambda q, k: functional.rope(q, k, freqs=freqs)} | peers()
        steps = {name: through_autograd(function) for name, function in contenders.items()}
        bench.compare(case, steps, lambda: (*(t.requires_grad_() for t in inputs()), *inputs()))


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
