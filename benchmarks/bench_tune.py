"""The gain of te.tune: te.Linear and te.LayerNormMLP forward and backward with tuned products against the untuned ones
(the shapes of targets.py cases 11 and 14), and the tuning table of each. CUDA only.

Flops: 6 M N K for a Linear, 18 T hidden ffn_hidden for the MLP. The two contenders are one module; each step first
activates its choices, which costs only host time. The peer `own bf16` is the untuned module."""

from bench_linear import GPU_SHAPES
from bench_mlp import GPU as MLP
from common import TORCH_DTYPES, Bench, Case, training_step

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

DTYPE = "bf16"
CANDIDATES = 64


def compare(bench, case, module, sets, peers=()):
    """The module with its choices active, without them, and its peers ({name: module})."""
    tuning = te.tune(module, sets()[0], candidates=CANDIDATES)
    print(tuning, flush=True)
    keys, choices = [dict(r.problem) for r in tuning.rows], [r.algorithm for r in tuning.rows]
    step = training_step(module)

    def tuned(x, dy):
        _C.gemm_choose(keys, choices)
        step(x, dy)

    def untuned(x, dy):
        _C.gemm_forget_choices()
        step(x, dy)

    others = {name: training_step(peer) for name, peer in dict(peers).items()}
    bench.compare(case, {"ours": tuned, f"own {case.dtype}": untuned} | others, sets)
    te.tune.clear()


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        print("bench_tune: cuBLASLt's products are on CUDA; nothing to measure here")
        return
    dtype = TORCH_DTYPES[DTYPE]
    for m, n, k in GPU_SHAPES:
        case = Case("11", "linear_tuned", DTYPE, (m, n, k), "forward+backward", flops=6 * m * n * k)
        if bench.selects(case):
            module = te.Linear(k, n, bias=False, params_dtype=dtype, device=bench.device)

            def sets(m=m, n=n, k=k):
                return bench.randn(m, k, dtype=DTYPE, grad=True), bench.randn(m, n, dtype=DTYPE)

            compare(bench, case, module, sets)
    tokens, hidden, ffn = MLP[1]
    case = Case(
        "14", "layernorm_mlp_tuned", DTYPE, (tokens, hidden, ffn), "forward+backward", flops=18 * tokens * hidden * ffn
    )
    if bench.selects(case):
        options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": dtype}
        module = te.LayerNormMLP(hidden, ffn, device=bench.device, **options)
        compare(
            bench,
            case,
            module,
            lambda: (bench.randn(tokens, hidden, dtype=DTYPE, grad=True), bench.randn(tokens, hidden, dtype=DTYPE)),
        )
    bench.finish()


if __name__ == "__main__":
    main()
