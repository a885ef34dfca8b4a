"""te.Linear forward and backward against nn.Linear (targets.py case 11), and in FP8, quantization included, against
itself in bf16 (case 12). Flops: 6 M N K (fprop, dgrad, wgrad)."""

import torch
from common import TE_PEER, TORCH_DTYPES, Bench, Case, training_step
from fp8 import RECIPES, Quantized

import transformer_engine.pytorch as te

# M, N, K and TE 2.20.2's time in us, measured on an H200, 2026-11-20
GPU_SHAPES = (
    ((8192, 28672, 4096), 8330.0),
    ((8192, 4096, 14336), 4250.0),
    ((8192, 6144, 4096), 1800.0),
    ((8192, 4096, 4096), 1220.0),
)
# The same in FP8: delayed, current, block
TE_FP8_US = (
    {"delayed": 4958.0, "current": 5085.0, "block": 6077.5},
    {"delayed": 2507.1, "current": 2777.2, "block": 3119.7},
    {"delayed": 1117.8, "current": 1226.3, "block": 1427.2},
    {"delayed": 830.9, "current": 1079.4, "block": 1157.4},
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


def run_fp8(bench, shape, te_us):
    m, n, k = shape

    def sets():
        return bench.randn(m, k, dtype="bf16", grad=True), bench.randn(m, n, dtype="bf16")

    linear = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=bench.device)
    for name in RECIPES:
        case = Case("12", f"linear_{name}", "fp8", shape, "forward+backward", flops=6 * m * n * k)
        if bench.wants(case):
            contenders = {"ours": training_step(Quantized(linear, name)), "own bf16": training_step(linear)}
            bench.compare(case, contenders | {TE_PEER: te_us[name] * bench.te_scale()}, sets)


def main():
    bench = Bench(__doc__)
    dtype, shapes = ("bf16", GPU_SHAPES) if bench.cuda else ("fp32", CPU_SHAPES)
    for shape, te_us in shapes:
        run(bench, dtype, shape, te_us)
    if bench.cuda:
        for (shape, _), te_us in zip(GPU_SHAPES, TE_FP8_US, strict=True):
            run_fp8(bench, shape, te_us)
    bench.finish()


if __name__ == "__main__":
    main()
