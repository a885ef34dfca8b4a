"""te.LayerNormMLP (RMSNorm, SwiGLU, no bias) forward and backward against the same block in plain PyTorch, eager and
compiled, and what each keeps for backward (targets.py case 14); the same in FP8 beside bf16 (case 14f); `_cached`: with
weights that are quantized once.

Flops: 18 T hidden ffn_hidden (three projections, three GEMMs each); the norm and the activation are not counted."""

import torch
from common import TORCH_DTYPES, Bench, Case, keeps_mib, training_step
from fp8 import RECIPES, Quantized, pairs
from plain import Mlp

import transformer_engine.pytorch as te

GPU, CPU = ("bf16", (8192, 4096, 14336)), ("fp32", (512, 512, 1408))
CPU_FP8 = (64, 64, 96)


def main():
    bench = Bench(__doc__)
    dtype, (tokens, hidden, ffn_hidden) = GPU if bench.cuda else CPU
    torch_dtype, shape = TORCH_DTYPES[dtype], (tokens, hidden, ffn_hidden)
    options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": torch_dtype}
    modules = {
        "ours": te.LayerNormMLP(hidden, ffn_hidden, device=bench.device, **options),
        "torch eager": Mlp(hidden, ffn_hidden, device=bench.device, dtype=torch_dtype),
    }
    modules |= bench.compiled(lambda: Mlp(hidden, ffn_hidden, device=bench.device, dtype=torch_dtype))

    def sets():
        return bench.randn(tokens, hidden, dtype=dtype, grad=True), bench.randn(tokens, hidden, dtype=dtype)

    case = Case("14", "layernorm_mlp", dtype, shape, "forward+backward", flops=18 * tokens * hidden * ffn_hidden)
    if bench.selects(case):
        bench.compare(case, {name: training_step(module) for name, module in modules.items()}, sets)

    case = Case("14", "layernorm_mlp", dtype, shape, "keeps")
    if bench.selects(case):
        bench.record(case, {name: keeps_mib(module, sets()[0]) for name, module in modules.items()}, "MiB")
    run_fp8(bench, shape if bench.cuda else CPU_FP8, options | {"params_dtype": torch.bfloat16})
    bench.finish()


def run_fp8(bench, shape, options):
    """`packed`: also keeps the pre-activation as FP8."""
    tokens, hidden, ffn_hidden = shape
    plain = te.LayerNormMLP(hidden, ffn_hidden, device=bench.device, **options)
    packed = te.LayerNormMLP(hidden, ffn_hidden, device=bench.device, save_preactivation="fp8", **options)
    variants = [(name, suffix, plain, cached) for name, suffix, cached in pairs()]
    variants += [(name, "_packed", packed, False) for name in RECIPES]

    def sets():
        return bench.randn(tokens, hidden, dtype="bf16", grad=True), bench.randn(tokens, hidden, dtype="bf16")

    for name, suffix, module, cached in variants:
        op, ours = f"layernorm_mlp_{name}{suffix}", Quantized(module, name, cached)
        case = Case("14f", op, "fp8", shape, "forward+backward", flops=18 * tokens * hidden * ffn_hidden)
        if bench.selects(case):
            bench.compare(case, {"ours": training_step(ours), "own bf16": training_step(plain)}, sets)
        case = Case("14f", op, "fp8", shape, "keeps")
        if not cached and bench.selects(case):
            own = keeps_mib(plain, sets()[0])
            bench.record(case, {"ours": keeps_mib(ours, sets()[0]), "own bf16": own}, "MiB")


if __name__ == "__main__":
    main()
