"""Host time of a step at 16 tokens, 256 wide, where the kernels are shorter than their launches (targets.py case H),
and of the parts of a forward.

Counts the GEMMs' flops, as the other benchmarks of the same modules do. On a CPU, where the time includes the
computing, the figures only serve to compare two builds (alternate.py)."""

import torch
import torch.nn.functional as F
from common import Bench, Case, training_step
from fp8 import RECIPES, Quantized
from plain import Mlp

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C, functional

TOKENS, HIDDEN, FFN_HIDDEN = 16, 256, 512


def parts_of(linear):
    """The parts of a forward's host time, from the inside out: the product alone, the function without a graph, with
    one; the module's row minus the second is its Python. Forward rows run without gradients."""
    ours, plain = (module.weight for module in linear)

    def with_graph(function):
        def run(x):
            with torch.enable_grad():
                return function(x)

        return run

    def functions():
        return {"ours": lambda x: functional.linear(x, ours), "torch eager": lambda x: F.linear(x, plain)}

    return {
        "linear_product": {
            "ours": lambda x: _C.gemm(ours, x, "TN", "none", None, None, None),
            "torch eager": lambda x: torch.mm(x, plain.t()),
        },
        "linear_function": functions(),
        "linear_node": {name: with_graph(function) for name, function in functions().items()},
    }


def main():
    bench = Bench(__doc__)
    ours = {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
    plain = {"dtype": torch.bfloat16, "device": bench.device}
    linear = te.Linear(HIDDEN, HIDDEN, **ours), torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **plain)
    adding = te.Linear(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True, **ours)
    adding.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, device=bench.device)
    mlp_options = dict(normalization="RMSNorm", activation="swiglu", **ours)
    mlp = te.LayerNormMLP(HIDDEN, FFN_HIDDEN, **mlp_options), Mlp(HIDDEN, FFN_HIDDEN, **plain)

    def sets():
        return bench.randn(TOKENS, HIDDEN, dtype="bf16", grad=True), bench.randn(TOKENS, HIDDEN, dtype="bf16")

    def step(op, modules, shape, flops, dtype="bf16"):
        case = Case("H", op, dtype, shape, "forward+backward", flops=flops)
        if bench.selects(case):
            contenders = dict(zip(("ours", "torch eager"), map(training_step, modules), strict=True))
            bench.compare_host(case, contenders, sets)

    shape = (TOKENS, HIDDEN, HIDDEN)
    case = Case("H", "linear", "bf16", shape, "forward", flops=2 * TOKENS * HIDDEN * HIDDEN)
    if bench.selects(case):
        bench.compare_host(case, dict(zip(("ours", "torch eager"), linear, strict=True)), lambda: sets()[:1])
    for op, contenders in parts_of(linear).items():
        case = Case("H", op, "bf16", shape, "forward", flops=2 * TOKENS * HIDDEN * HIDDEN)
        if bench.selects(case):
            bench.compare_host(case, contenders, lambda: sets()[:1])
    mlp_shape, linear_flops, mlp_flops = (TOKENS, HIDDEN, FFN_HIDDEN), 6 * HIDDEN * HIDDEN, 18 * HIDDEN * FFN_HIDDEN
    step("linear", linear, shape, TOKENS * linear_flops)
    step("linear_main_grad", (adding, linear[1]), shape, TOKENS * linear_flops)
    step("layernorm_mlp", mlp, mlp_shape, TOKENS * mlp_flops)
    for name in RECIPES:  # the peers stay in bf16
        fp8_linear, fp8_mlp = Quantized(linear[0], name), Quantized(mlp[0], name)
        step(f"linear_{name}", (fp8_linear, linear[1]), shape, TOKENS * linear_flops, "fp8")
        step(f"layernorm_mlp_{name}", (fp8_mlp, mlp[1]), mlp_shape, TOKENS * mlp_flops, "fp8")
    bench.finish()


if __name__ == "__main__":
    main()
