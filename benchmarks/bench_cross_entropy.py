"""Cross entropy forward and backward beside plain PyTorch, eager and compiled, and that of a head beside its separate
product and loss: time, and the peak besides the weight's gradient (targets.py case 25).

Bytes of a loss in place: 2b an element of b bytes, its logits read and its gradient written; reduce_loss, an incoming
gradient of 1. Ours writes over its input, so each call of each contender gets fresh logits of N(0, 1) before, untimed.
Flops of a head: 6 tokens x features x classes. `_own_dtype`: weight_grad_dtype is the dtype of the weight."""

import dataclasses

import torch
from common import TORCH_DTYPES, Bench, Case
from torch.nn import functional as F

import transformer_engine.pytorch as te

GPU_SHAPES, GPU_HEADS = (("bf16", (4096, 128256)), ("bf16", (8192, 32000))), (("bf16", (8192, 4096, 128256)),)
CPU_SHAPES, CPU_HEADS = (("fp32", (256, 32000)), ("bf16", (256, 32000))), (("fp32", (512, 256, 8000)),)


def plain(logits, target):
    return F.cross_entropy(logits.float(), target)


def step_of(loss_of):
    def step(*tensors):
        for t in tensors:
            t.grad = None
        loss_of(*tensors).backward()

    return step


def run(bench, dtype, shape):
    tokens, classes = shape
    target = torch.randint(0, classes, (tokens,), device=bench.device)
    size = 2 * TORCH_DTYPES[dtype].itemsize * tokens * classes
    case = Case("25", "cross_entropy", dtype, shape, "forward+backward", bytes=size)
    if not bench.selects(case):
        return
    losses = {
        "ours": lambda x: te.parallel_cross_entropy(x, target, reduce_loss=True),
        "torch eager": lambda x: plain(x, target),
    }
    losses |= bench.compiled(lambda: lambda x: plain(x, target))
    steps = {name: step_of(loss) for name, loss in losses.items()}

    def fresh(x):
        with torch.no_grad():
            x.normal_()

    bench.compare(case, steps, lambda: (bench.randn(*shape, dtype=dtype, grad=True),), prepare=fresh)


def peak_mib(step, inputs):
    """Peak of the second step, besides earlier memory and the weight's gradient."""
    step(*inputs)
    for t in inputs:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*inputs)
    return (torch.cuda.max_memory_allocated() - before - inputs[1].grad.nbytes) / 2**20


def run_head(bench, dtype, shape):
    tokens, features, classes = shape
    target = torch.randint(0, classes, (tokens,), device=bench.device)
    case = Case("25", "linear_cross_entropy", dtype, shape, "forward+backward", flops=6 * tokens * features * classes)

    def make():
        weight = bench.randn(classes, features, dtype=dtype) * features**-0.5
        return bench.randn(tokens, features, dtype=dtype, grad=True), weight.requires_grad_()

    def separate(h, w):
        return te.parallel_cross_entropy(te.functional.linear(h, w), target, reduce_loss=True)

    for suffix, sums in (("", torch.float32), ("_own_dtype", TORCH_DTYPES[dtype])):
        if suffix and sums is torch.float32:
            continue
        losses = {
            "ours": lambda h, w, sums=sums: te.fused_linear_cross_entropy(h, w, target, weight_grad_dtype=sums),
            "own separate": separate,
            "torch eager": lambda h, w: plain(F.linear(h, w), target),
        }
        losses |= bench.compiled(lambda: lambda h, w: plain(F.linear(h, w), target))
        steps = {name: step_of(loss) for name, loss in losses.items()}
        this = dataclasses.replace(case, op=case.op + suffix)
        if bench.selects(this):
            bench.compare(this, steps, make)
        peak = dataclasses.replace(case, op=f"{case.op}_peak{suffix}", direction="keeps", flops=0)
        if bench.cuda and bench.selects(peak):
            bench.record(peak, {name: peak_mib(step, make()) for name, step in steps.items()}, "MiB")


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
    for dtype, shape in GPU_HEADS if bench.cuda else CPU_HEADS:
        run_head(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
