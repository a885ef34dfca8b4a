"""Sequence-parallel layers over the ranks that torchrun has started (targets.py case M), beside plain torch: an
autograd all-gather, F.linear and a reduce-scatter.

    torchrun --nproc-per-node=2 bench_parallel.py                    # NCCL, each rank on its own CUDA device
    torchrun --nproc-per-node=2 bench_parallel.py --device cpu       # gloo, small shapes: checks that it runs

A layer is a pair: a column [N/t, K] and a row [K, N/t]; M tokens of all ranks. `ours` gathers a column's input again in
its backward, `own keep` keeps the gathered input. Besides the rows, parallel_memory_<device>x<ranks>.csv (and .png, if
matplotlib is installed) traces memory over microbatches: all forwards, then all backwards, the last first."""

import csv

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Case
from rank_bench import RankBench

import transformer_engine.pytorch as te

MICROBATCHES, STEP = 4, "forward+backward"
SHAPES = {"cuda": [(8192, 14336, 4096), (8192, 28672, 8192)], "cpu": [(64, 96, 32)]}  # M, N, K
LAYERS = {"cuda": (4, 64), "cpu": (2, 4)}  # layers of the trace, and of the comparison with the prediction
STACK = {"cuda": (8192, 4096, 4096), "cpu": (64, 32, 32)}
HOST = {"cuda": (16, 256, 256), "cpu": (16, 32, 32)}
HOST_CALLS = 20  # fewer launches than a stream accepts before the host must wait for it


class Gather(torch.autograd.Function):
    """Plain torch's collective along dimension 0; its backward is the opposite one."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return ReduceScatter.apply(gradient)


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty((x.shape[0] // dist.get_world_size(), *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient)


class Stack:
    """Pairs over the ranks, called in three ways over the same parameters."""

    def __init__(self, bench, shape, layers):
        self.bench, (self.tokens, self.wide, self.hidden) = bench, shape
        shared = {"sequence_parallel": True, "tp_group": dist.group.WORLD, "bias": False}
        shared |= {"device": bench.device, "params_dtype": torch.bfloat16}
        self.pairs = [
            (
                te.Linear(self.hidden, self.wide, parallel_mode="column", **shared),
                te.Linear(self.wide, self.hidden, parallel_mode="row", **shared),
            )
            for _ in range(layers)
        ]
        self.parameters = [module.weight for pair in self.pairs for module in pair]
        for parameter in self.parameters:  # preallocated targets, so that no way allocates them
            parameter.grad = torch.zeros_like(parameter)
        self.ways = {
            "ours": lambda x, pair: self._ours(x, pair, True),
            "own keep": lambda x, pair: self._ours(x, pair, False),
            "torch eager": self._plain,
        }

    def inputs(self, microbatches=1):
        rows = self.tokens // self.bench.ranks
        return [self.bench.randn(rows, 1, self.hidden, dtype="bf16", grad=True) for _ in range(microbatches)]

    @staticmethod
    def _ours(x, pair, recompute):
        column, row = pair
        column.tp_recompute_allgather = recompute
        return row(column(x))

    @staticmethod
    def _plain(x, pair):
        column, row = pair
        return ReduceScatter.apply(F.linear(F.linear(Gather.apply(x), column.weight), row.weight))

    def forward(self, way, x, behind=lambda x: None):
        for pair in self.pairs:
            x = self.ways[way](x, pair)
            behind(x)
        return x

    def step(self, way, xs, dy, behind=lambda x: None):
        """All forwards, then all backwards, the last first."""
        results = []
        for x in xs:
            x.grad = None
            results.append(self.forward(way, x, behind))
        while results:
            results.pop().backward(dy)

    def kept_mib(self, way):
        """Bytes of the distinct storages that saved-tensor hooks see besides the parameters, including the input's."""
        seen = []

        def pack(t):
            seen.append(t.detach())
            return seen[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = self.forward(way, *self.inputs())
        own = {p.untyped_storage().data_ptr() for p in self.parameters}
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
        del y
        return sum(size for address, size in kept.items() if address not in own) / 2**20


def pairs(bench, shape):
    """Time and saved bytes of one pair."""
    m, n, k = shape
    timed = Case("M", "parallel_pair", "bf16", shape, STEP, flops=12 * m * n * k // bench.ranks)
    keeps = Case("M", "parallel_pair", "bf16", shape, "keeps")
    if not (bench.selects(timed) or bench.selects(keeps)):
        return
    stack = Stack(bench, shape, 1)
    if bench.selects(keeps):
        bench.record(keeps, {way: stack.kept_mib(way) for way in stack.ways}, "MiB")
        bench.say(f"  M/t K e is {m * k * 2 / bench.ranks / 2**20:g} MiB, M K e {m * k * 2 / 2**20:g} MiB")
    if bench.selects(timed):
        xs, (dy,) = stack.inputs(), stack.inputs()
        runs = {way: lambda way=way: stack.step(way, xs, dy.detach()) for way in stack.ways}
        bench.compare_ranks(timed, runs, calls=10 if bench.cuda else 1)


def peaks(bench, shape):
    """Memory of several microbatches in flight, and a trace of it."""
    layers, case = LAYERS[bench.device.type][0], Case("M", "parallel_peak", "bf16", shape, "keeps")
    if not bench.selects(case):
        return
    stack = Stack(bench, shape, layers)
    xs, (dy,) = stack.inputs(MICROBATCHES), stack.inputs()
    traces, steps = {}, {way: lambda way=way: stack.step(way, xs, dy.detach()) for way in stack.ways}
    if bench.cuda:  # the memory of a process on a CPU is no figure
        bench.record(case, {way: bench.peak_mib(step) for way, step in steps.items()}, "MiB")
    for way in stack.ways:
        trace = traces[way] = []

        def note(trace=trace):
            if bench.cuda:
                torch.cuda.synchronize()
            trace.append(bench.memory() / 2**20)
            bench.reset_memory()

        def behind(x, note=note):
            note()
            x.register_hook(lambda gradient: note())

        bench.together()
        bench.reset_memory()
        note()
        stack.step(way, xs, dy.detach(), behind)
        note()
    if bench.rank == 0:
        draw(bench, traces, layers)


def draw(bench, traces, layers):
    with bench.trace.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["layer of the step", *traces])
        writer.writerows([i, *(f"{value:.3f}" for value in row)] for i, row in enumerate(zip(*traces.values())))
    bench.say(f"  trace: {bench.trace}")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for way, trace in traces.items():
        axes.plot(trace, label=way)
    axes.set(
        xlabel=f"layers done: {MICROBATCHES} forwards of {layers}, then as many backwards",
        ylabel="MiB, at the largest since the layer before",
        title=f"rank 0 of {bench.ranks}, a column and a row to a layer",
    )
    axes.legend()
    figure.tight_layout()
    for kind in (".png", ".svg"):
        figure.savefig(bench.trace.with_suffix(kind), dpi=120)
        bench.say(f"  trace: {bench.trace.with_suffix(kind)}")


def prediction(bench):
    """The cost of keeping at the peak of many layers, against layers (t - 1) / t M K e."""
    kind = bench.device.type
    shape, layers = STACK[kind], LAYERS[kind][1]
    case = Case("M", "parallel_keeping", "bf16", (layers, *shape), "keeps")
    if not bench.selects(case):
        return
    m, _, k = shape
    predicted = layers * (bench.ranks - 1) / bench.ranks * m * k * 2 / 2**20
    stack = Stack(bench, shape, layers)
    xs, (dy,) = stack.inputs(), stack.inputs()
    steps = {way: lambda way=way: stack.step(way, xs, dy.detach()) for way in ("ours", "own keep")}
    if bench.cuda:
        measure = {way: bench.peak_mib(step) for way, step in steps.items()}
    else:  # only the kept bytes can be predicted
        measure = {way: stack.kept_mib(way) for way in steps}
    cost = measure["own keep"] - measure["ours"]
    bench.record(case, {"ours": cost, "predicted": predicted}, "MiB")
    bench.say(f"  keeping costs {cost / predicted:.4f} of the prediction (wanted within 5%)")


def host(bench):
    """Host time of a divided Linear beyond an undivided one and beyond its collectives."""
    m, n, k = shape = HOST[bench.device.type]
    case = Case("M", "parallel_linear_host", "bf16", shape, STEP, flops=6 * m * n * k // bench.ranks)
    if not bench.selects(case):
        return
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
    divided = te.Linear(k, n, parallel_mode="column", sequence_parallel=True, tp_group=dist.group.WORLD, **options)
    undivided = te.Linear(k, n // bench.ranks, **options)  # the same products, with all rows
    rows = m // bench.ranks
    x, whole = (bench.randn(count, 1, k, dtype="bf16", grad=True) for count in (rows, m))
    dy = bench.randn(m, 1, n // bench.ranks, dtype="bf16")
    own, gathered, inbox = x.detach(), torch.empty_like(whole), torch.empty_like(whole)

    def step(module, leaf):
        leaf.grad = module.weight.grad = None
        module(leaf).backward(dy)

    def alone():
        """A forward's gather, a backward's, and the exchange of the input gradient's parts."""
        for _ in range(2):
            dist.all_gather_into_tensor(gathered, own)
        dist.all_to_all_single(inbox, gathered)

    contenders = {
        "ours": lambda: step(divided, x),
        "own undivided": lambda: step(undivided, whole),
        "collectives": alone,
    }
    p50 = bench.compare_ranks(case, contenders, HOST_CALLS, host=True)
    beyond = p50["ours"] - p50["own undivided"] - p50["collectives"]
    bench.say(f"  beyond the undivided layer and the collectives: {beyond:.1f} us (wanted <= 60 on CUDA)")


def main():
    bench = RankBench(__doc__)
    host(bench)
    for shape in SHAPES[bench.device.type]:
        pairs(bench, shape)
    peaks(bench, SHAPES[bench.device.type][0])
    prediction(bench)
    bench.finish()


if __name__ == "__main__":
    main()
