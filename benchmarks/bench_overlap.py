"""Products beside their communication (targets.py case M): a column's gather and product, a row's product and scatter,
with tp_overlap "chunked" (ours), "auto" (own auto), over the group and then computed (ours serial), and by torch's
symmetric memory (torch fused). `gemm` is the rank's product alone: the targets are ratios to it.

    torchrun --nproc-per-node=2 bench_overlap.py                    # each rank on its own CUDA device
    torchrun --nproc-per-node=2 bench_overlap.py --device cpu       # small shapes: checks that it runs

First it prints an entry of ops/comm/costs.cpp for such devices, by which "auto" decides (link_costs.py). `predicted` is
the time of "chunked" by the plan and that entry: the measured time of the product, longer in the same proportion.
--tokens selects the numbers of tokens; the first one of all also measures a column's backward. A shape is tokens of all
ranks, width of all ranks' weights, depth: [M, K] x [N / t, K]^T of a column, [M, K / t] x [N, K / t]^T of a row."""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Case
from engine_calls import Costs, Product, predicted_us
from link_costs import Meter
from rank_bench import RankBench

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.peer import kind_of

MODELS = {  # N, K: 70B gate_up, qkv, 8B gate_up, qkv; 70B down, o_proj, 8B down
    "gather_linear": [(57344, 8192), (10240, 8192), (28672, 4096), (6144, 4096)],
    "linear_scatter": [(8192, 28672), (8192, 8192), (4096, 14336)],
}
TOKENS = {"cuda": (8192, 256, 512, 1024, 2048, 4096, 16384), "cpu": (256,)}
SAMPLE_US, FLOPS_PER_US = 8_000, 7e8  # time of a sample on CUDA, which gives its number of calls
ROUNDS = 15
CPU = {"gather_linear": [(96, 32)], "linear_scatter": [(32, 96)]}


def calls_of(bench, case):
    if not bench.cuda:
        return 2
    return max(4, min(20, round(SAMPLE_US * FLOPS_PER_US / case.flops)))


def layer(bench, op, n, k, overlap, **options):
    mode = "column" if op == "gather_linear" else "row"
    return te.Linear(
        k,
        n,
        bias=False,
        parallel_mode=mode,
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        tp_overlap=overlap,
        params_dtype=torch.bfloat16,
        device=bench.device,
        **options,
    )


def fused(op, x, weight):
    """Torch's own; None if this build has none, or the devices do not reach each other."""
    name = dist.group.WORLD.group_name
    if not x.is_cuda:
        return None
    try:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.enable_symm_mem_for_group(name)
        if op == "gather_linear":
            return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, name)
        return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, name)
    except (ImportError, AttributeError, RuntimeError):
        return None


def prediction(bench, op, m, n, k, weight, whole, costs):
    """The predicted time of a call in chunks over that of its product; None where that has no runs."""
    tile = Product(weight, whole, torch.empty(m, len(weight), dtype=weight.dtype, device=bench.device)).tile()
    if tile is None:
        return None
    chunked, alone = predicted_us(op, m, len(weight), weight.shape[1], bench.ranks, tile, costs)
    return chunked / alone


def forward(bench, op, m, n, k, costs):
    case = Case("M", op, "bf16", (m, n, k), "forward", flops=2 * m * n * k // bench.ranks)
    if not bench.selects(case):
        return
    gather = op == "gather_linear"
    chunked = layer(bench, op, n, k, "chunked")
    serial, auto = layer(bench, op, n, k, "off"), layer(bench, op, n, k, "auto")
    for module in (serial, auto):
        module.load_state_dict(chunked.state_dict())
    weight = chunked.weight.detach()
    rows = m // bench.ranks if gather else m
    x = bench.randn(rows, k if gather else k // bench.ranks, dtype="bf16")
    whole = bench.randn(m, x.shape[1], dtype="bf16")

    def call(module):
        def run():
            with torch.no_grad():
                module(x)

        return run

    ways = {"ours": call(chunked), "own auto": call(auto), "ours serial": call(serial)}
    ways["gemm"] = lambda: F.linear(whole, weight)
    peer = fused(op, x, weight)
    if peer is not None:
        ways["torch fused"] = peer
    p50 = bench.compare_ranks(case, ways, calls=calls_of(bench, case))
    longer = prediction(bench, op, m, n, k, weight, whole, costs)
    if longer is not None:
        bench.record(case, {"predicted": longer * p50["gemm"]}, "us")
        bench.say(f"  predicted {longer:.3f} of the product, measured {p50['ours'] / p50['gemm']:.3f}")


def backward(bench, m, n, k, direction):
    """A column's backward, or both directions, and the time outside of the product. `own keep`: without the backward's
    gather."""
    both = direction == "forward+backward"
    flops = (6 if both else 4) * m * n * k // bench.ranks
    case = Case("M", "gather_linear", "bf16", (m, n, k), direction, flops=flops)
    if not bench.selects(case):
        return
    x = bench.randn(m // bench.ranks, k, dtype="bf16", grad=True)
    dy = bench.randn(m, n // bench.ranks, dtype="bf16")
    whole = te.Linear(k, n // bench.ranks, bias=False, params_dtype=torch.bfloat16, device=bench.device)
    inputs = bench.randn(m, k, dtype="bf16", grad=True)

    def call(module, leaf):
        y = None if both else module(leaf)

        def run():
            if both:
                leaf.grad = module.weight.grad = None
                module(leaf).backward(dy)
            else:
                torch.autograd.grad(y, (leaf, module.weight), dy, retain_graph=True)

        return run

    ways = {
        "ours": call(layer(bench, "gather_linear", n, k, "chunked"), x),
        "own keep": call(layer(bench, "gather_linear", n, k, "chunked", tp_recompute_allgather=False), x),
        "ours serial": call(layer(bench, "gather_linear", n, k, "off"), x),
        "gemm": call(whole, inputs),
    }
    bench.compare_ranks(case, ways, calls=calls_of(bench, case))


def main():
    bench = RankBench(__doc__, lambda parser: parser.add_argument("--tokens", type=int, nargs="+"))
    _C.set_cpu_products("loop")
    shapes, tokens = MODELS if bench.cuda else CPU, TOKENS[bench.device.type]
    meter = Meter(bench)  # keeps the memory mapped: if one rank unmaps it, the next meeting may find it half gone
    link, bench.rounds = meter.link(), min(ROUNDS, bench.rounds)
    costs = Costs(**dataclasses.asdict(link))
    bench.say("an entry of ops/comm/costs.cpp, where each rank has a device of its own:")
    bench.say(link.entry(kind_of(bench.device)))
    counts = bench.options.tokens or tokens
    for m in counts:
        for op, widths in shapes.items():
            for n, k in widths:
                forward(bench, op, m, n, k, costs)
    for n, k in shapes["gather_linear"][:1] if tokens[0] in counts else ():
        for direction in ("backward", "forward+backward"):
            backward(bench, tokens[0], n, k, direction)
    bench.finish()


if __name__ == "__main__":
    main()
