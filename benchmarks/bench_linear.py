"""te.Linear forward and backward against nn.Linear (targets.py case 11). Flops: 6 M N K (fprop, dgrad, wgrad)."""

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


def run(bench, dtype, shape, te_us):
    m, n, k = shape
    torch_dtype = TORCH_DTYPES[dtype]

    def sets():
        return bench.randn(m, k, dtype=dtype, grad=True), bench.randn(m, n, dtype=dtype)

    case = Case("11", "linear", dtype, shape, "forward+backward", flops=6 * m * n * k)
    if bench.wants(case):
        ours = te.Linear(k, n, bias=False, params_dtype=torch_dtype, device=bench.device)
        plain = torch.nn.Linear(k, n, bias=False, dtype=torch_dtype, device=bench.device)
        contenders = {"ours": training_step(ours), "torch eager": training_step(plain)}
        if bench.cuda:
            contenders[TE_PEER] = te_us * bench.te_scale()
        bench.compare(case, contenders, sets)


def main():
    bench = Bench(__doc__)
    dtype, shapes = ("bf16", GPU_SHAPES) if bench.cuda else ("fp32", CPU_SHAPES)
    for shape, te_us in shapes:
        run(bench, dtype, shape, te_us)
    bench.finish()


if __name__ == "__main__":
    main()
