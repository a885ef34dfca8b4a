"""te.Linear forward and backward against nn.Linear (targets.py case 11), with and without fp32 main_grad accumulation.

Flops: 6 M N K (fprop, dgrad, wgrad). `linear_main_grad` adds the weight gradient into an fp32 buffer: ours inside the
GEMM, the peer by an add after it."""

import torch
from common import TE_PEER, TORCH_DTYPES, Bench, Case, training_step

import transformer_engine.pytorch as te

# M, N, K and TE 2.20.2's time in us, measured on an H200, 2026-11-20
GPU_SHAPES = (
    ((8192, 28672, 4096), 8330.0),
    ((8192, 4096, 14336), 4250.0),
    ((8192, 6144, 4096), 1800.0),
    ((8192, 4096, 4096), 1220.0),
)
CPU_SHAPES = (((512, 2816, 512), None), ((512, 512, 1408), None))


def accumulating_step(module, fused):
    """As training_step, with weight.main_grad += the weight's gradient."""
    weight = module.weight
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)

    def step(x, dy):
        x.grad = weight.grad = None
        module(x).backward(dy)
        if not fused:
            weight.main_grad.add_(weight.grad)

    return step


def run(bench, dtype, shape, te_us):
    m, n, k = shape
    here = {"device": bench.device}

    def sets():
        return bench.randn(m, k, dtype=dtype, grad=True), bench.randn(m, n, dtype=dtype)

    def ours(**options):
        return te.Linear(k, n, bias=False, params_dtype=TORCH_DTYPES[dtype], **here, **options)

    def plain():
        return torch.nn.Linear(k, n, bias=False, dtype=TORCH_DTYPES[dtype], **here)

    case = Case("11", "linear", dtype, shape, "forward+backward", flops=6 * m * n * k)
    if bench.wants(case):
        contenders = {"ours": training_step(ours()), "torch eager": training_step(plain())}
        if bench.cuda:
            contenders[TE_PEER] = te_us * bench.te_scale()
        bench.compare(case, contenders, sets)

    case = Case("11", "linear_main_grad", dtype, shape, "forward+backward", flops=6 * m * n * k)
    if bench.wants(case):
        fused = accumulating_step(ours(fuse_wgrad_accumulation=True), fused=True)
        bench.compare(case, {"ours": fused, "torch eager": accumulating_step(plain(), fused=False)}, sets)


def main():
    bench = Bench(__doc__)
    dtype, shapes = ("bf16", GPU_SHAPES) if bench.cuda else ("fp32", CPU_SHAPES)
    for shape, te_us in shapes:
        run(bench, dtype, shape, te_us)
    bench.finish()


if __name__ == "__main__":
    main()
