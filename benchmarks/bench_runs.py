"""A product computed whole and in the runs of rows of tensor parallelism's plans, on one CUDA device without
communication. It measures the cost of runs in one stream, and in two alternating ones, where the next run's tiles fill
the last wave of the one before. Shapes as in bench_overlap.py: [M, K] x [N / t, K]^T of a column, [M, K / t] x [N, K /
t]^T of a row, the op with t at its end. Bits are compared."""

import torch
from bench_overlap import MODELS
from common import Bench, Case
from engine_calls import GEMM, Product, plan

M, RANKS = 8192, (2, 8)


def ways(bench, op, n, k, ranks):
    """{impl: function}, and the number of runs; None if the algorithm splits its reduction."""
    n, k = (n // ranks, k) if op == "gather_linear" else (n, k // ranks)
    x, weight = (bench.randn(rows, k, dtype="bf16") for rows in (M, n))
    y = torch.empty(M, n, dtype=torch.bfloat16, device=bench.device)
    product = Product(weight, x, y)
    tile = product.tile()
    if tile is None:
        return None
    whole = product.prepared(0, M)
    steps = [step for step in plan(op, M, n, k, ranks, tile=tile) if step.kind == GEMM]
    runs = [product.prepared(step.first, step.last) for step in steps]
    side, fork, join = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def one():
        here = torch.cuda.current_stream()
        for run in runs:
            run(here)

    def two():
        here = torch.cuda.current_stream()
        fork.record(here)
        side.wait_event(fork)
        for i, run in enumerate(runs):
            run(side if i % 2 else here)
        join.record(side)
        here.wait_event(join)

    whole(torch.cuda.current_stream())
    wanted = y.clone()
    for way in (one, two):
        y.fill_(torch.nan)
        way()
        if not torch.equal(y, wanted):
            raise RuntimeError(f"bench_runs: {op} of {ranks} ranks {M}x{n}x{k}: runs have other bits than the whole")
    return {"ours": two, "own one stream": one, "own whole": lambda: whole(torch.cuda.current_stream())}, len(runs)


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        print("bench_runs: runs in streams need a CUDA device; nothing to measure on the CPU")
        return
    for ranks in RANKS:
        for op, widths in MODELS.items():
            for n, k in widths:
                case = Case("M", f"runs_{op}_{ranks}", "bf16", (M, n, k), "forward", flops=2 * M * n * k // ranks)
                if not bench.selects(case):
                    continue
                found = ways(bench, op, n, k, ranks)
                if found is None:
                    print(f"bench_runs: {case.op} {case.shape}: the whole splits its reduction, no runs")
                    continue
                print(f"  {found[1]} runs")
                bench.compare(case, found[0], lambda: ())
    bench.finish()


if __name__ == "__main__":
    main()
