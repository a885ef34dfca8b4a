"""te.Linear forward and backward against nn.Linear (targets.py case 11), and in FP8, quantization included, against
its own and torch's bf16 (case 12); `_cached`: with weights that are quantized once. The same of te.LayerNormLinear
(RMSNorm) beside its own bf16. Flops: 6 M N K (fprop, dgrad, wgrad)."""

import torch
from common import TORCH_DTYPES, Bench, Case, training_step
from fp8 import Quantized, pairs

import transformer_engine.pytorch as te

# M, N, K
GPU_SHAPES = ((8192, 28672, 4096), (8192, 4096, 14336), (8192, 6144, 4096), (8192, 4096, 4096))
CPU_SHAPES = ((512, 2816, 512), (512, 512, 1408))
CPU_FP8_SHAPES = ((64, 96, 64),)


def run(bench, dtype, shape):
    m, n, k = shape
    torch_dtype = TORCH_DTYPES[dtype]

    def sets():
        return bench.randn(m, k, dtype=dtype, grad=True), bench.randn(m, n, dtype=dtype)

    case = Case("11", "linear", dtype, shape, "forward+backward", flops=6 * m * n * k)
    if bench.selects(case):
        ours = te.Linear(k, n, bias=False, params_dtype=torch_dtype, device=bench.device)
        plain = torch.nn.Linear(k, n, bias=False, dtype=torch_dtype, device=bench.device)
        bench.compare(case, {"ours": training_step(ours), "torch eager": training_step(plain)}, sets)


def run_fp8(bench, shape):
    m, n, k = shape

    def sets():
        return bench.randn(m, k, dtype="bf16", grad=True), bench.randn(m, n, dtype="bf16")

    linear = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=bench.device)
    plain = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=bench.device)
    norm = te.LayerNormLinear(
        k, n, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device=bench.device
    )
    for name, suffix, cached in pairs():
        for op, module, peers in (("linear", linear, {"torch eager": plain}), ("layernorm_linear", norm, {})):
            case = Case("12", f"{op}_{name}{suffix}", "fp8", shape, "forward+backward", flops=6 * m * n * k)
            if bench.selects(case):
                modules = {"ours": Quantized(module, name, cached), "own bf16": module} | peers
                bench.compare(case, {who: training_step(one) for who, one in modules.items()}, sets)


def main():
    bench = Bench(__doc__)
    dtype, shapes = ("bf16", GPU_SHAPES) if bench.cuda else ("fp32", CPU_SHAPES)
    for shape in shapes:
        run(bench, dtype, shape)
    for shape in GPU_SHAPES if bench.cuda else CPU_FP8_SHAPES:
        run_fp8(bench, shape)
    bench.finish()


if __name__ == "__main__":
    main()
