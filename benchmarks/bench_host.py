"""Host time of a step at 16 tokens, 256 wide, where the kernels are shorter than their launches (targets.py case H).

Counts the GEMMs' flops, as the other benchmarks of the same modules do; refuses to run without a GPU."""

import torch
from common import Bench, Case, training_step
from plain import Mlp

import transformer_engine.pytorch as te

TOKENS, HIDDEN, FFN_HIDDEN = 16, 256, 512


def main():
    bench = Bench(__doc__)
    ours = {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
    plain = {"dtype": torch.bfloat16, "device": bench.device}
    linear = te.Linear(HIDDEN, HIDDEN, **ours), torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **plain)
    mlp_options = dict(normalization="RMSNorm", activation="swiglu", **ours)
    mlp = te.LayerNormMLP(HIDDEN, FFN_HIDDEN, **mlp_options), Mlp(HIDDEN, FFN_HIDDEN, **plain)

    def sets():
        return bench.randn(TOKENS, HIDDEN, dtype="bf16", grad=True), bench.randn(TOKENS, HIDDEN, dtype="bf16")

    def step(op, modules, shape, flops):
        case = Case("H", op, "bf16", shape, "forward+backward", flops=flops)
        if bench.wants(case):
            contenders = dict(zip(("ours", "torch eager"), map(training_step, modules), strict=True))
            bench.compare_host(case, contenders, sets)

    shape = (TOKENS, HIDDEN, HIDDEN)
    case = Case("H", "linear", "bf16", shape, "forward", flops=2 * TOKENS * HIDDEN * HIDDEN)
    if bench.wants(case):
        bench.compare_host(case, dict(zip(("ours", "torch eager"), linear, strict=True)), lambda: sets()[:1])
    step("linear", linear, shape, 6 * TOKENS * HIDDEN * HIDDEN)
    step("layernorm_mlp", mlp, (TOKENS, HIDDEN, FFN_HIDDEN), 18 * TOKENS * HIDDEN * FFN_HIDDEN)
    bench.finish()


if __name__ == "__main__":
    main()
