"""The memory of a stack of MoE blocks (examples/moe) with everything kept, stashed, and with shapes that follow the
counts, beside the prediction (targets.py case 22): a table, a plot and rows.

S: bytes that a group keeps if all of its rows are alive and all experts get equally many. For layers x capacity, in
MiB:

    static  = layers * capacity * S
    stashed = sets * capacity * S + factor * live bytes of the groups that leave

sets: how many groups' originals there are at once. In a stack whose backward follows its forward it is 1, because
pre_schedule frees the previous group when the experts of the next one begin. It is 2, as PagedStash.plan() assumes, if
one comes back while another one leaves (1F1B). The last layer's backward follows its forward directly: it does not
leave.

Measured: the allocator's peak over a forward and backward (on the CPU from torch's profiler) besides the parameters'
gradients, which stay from step to step, and the pool, less the memory that no group keeps: a step's work besides one
layer (measured with all kept: of one layer, and for more layers of two), and what a layer keeps outside of its group
(of three layers less two, at capacity 1). The static rows of one layer and of two are therefore right by design.

The second table has Zipf routing and step times, and a third way, eager: the host waits for each layer's counts, which
determine every shape. It keeps least. Its costs are the memory that the allocator reserves for changing shapes, and the
waits; no CUDA graph can hold it.

    python benchmarks/stash_memory.py [--device cpu] [--results DIR]

Writes rows, and stash_memory_<device>.svg and .png beside them."""

import gc
import pathlib
import sys
import time
import warnings

import torch
from common import Bench, Case

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from moe.blocks import Config
from moe.memory import peak_bytes
from moe.run import Run, batch
from transformer_engine.pytorch.stash import PagedStash

CAPACITIES = (1.0, 1.5, 2.0, 4.0, 8.0)
FACTOR = 1.2
TIMED = 20
MIB = 2**20


class Grid:
    def __init__(self, bench):
        self.bench, self.device = bench, bench.device
        if bench.cuda:
            self.layers = (1, 2, 3, 4, 6, 8, 12, 16)
            self.sizes = {"tokens": 8192, "hidden": 2048, "ffn": 1024, "experts": 64, "here": 8, "k": 4}
            self.page_bytes = 524288
        else:
            self.layers = (1, 4, 16)
            self.sizes = {"tokens": 512, "hidden": 64, "ffn": 128, "experts": 16, "here": 2, "k": 2}
            self.page_bytes = 2048
        self.outside = self.peak(3, 1.0) - self.peak(2, 1.0) - self.group_bytes(1.0)
        self.work = {}
        for c in CAPACITIES:
            one = self.group_bytes(c)
            self.work[c, False] = self.peak(1, c) - one
            self.work[c, True] = self.peak(2, c) - 2 * one - self.outside

    def config(self, layers, capacity):
        return Config(layers=layers, capacity=capacity, **self.sizes)

    def group_bytes(self, capacity):
        config = self.config(1, capacity)
        return config.rows * config.row_bytes

    def run(self, layers, capacity, stash=None, skew="balanced"):
        run = Run(self.config(layers, capacity), self.device, stash)
        run.model.skew(skew)
        run.gradients_stay = True
        run.data = batch(run.config, self.device, 0)
        run.compute(*run.data)
        if stash is not None:
            stash.reset()
        return run

    def compute(self, run):
        """Again in a pool that is whole."""
        if run.stash is not None:
            run.stash.reset()
        run.compute(*run.data)

    def peak_of(self, run):
        gc.collect()
        return peak_bytes(lambda: self.compute(run), self.device)

    def peak(self, layers, capacity):
        return self.peak_of(self.run(layers, capacity))

    def groups(self, peak, layers, capacity):
        """The groups' part of a peak."""
        return peak - self.work[capacity, layers > 1] - (layers - 1) * self.outside

    def stash(self):
        return PagedStash(self.page_bytes, factor=FACTOR, device=self.device)

    def cell(self, layers, capacity):
        """Predicted and measured bytes: static, then stashed."""
        one = self.group_bytes(capacity)
        static = layers * one, self.groups(self.peak(layers, capacity), layers, capacity)
        stash = self.stash()
        run = self.run(layers, capacity, stash)
        verdict = stash.verdict(wait=True)
        pool = 0 if verdict is None else stash.plan().device_pages * self.page_bytes
        peak = self.groups(self.peak_of(run), layers, capacity) + pool
        live = 0 if verdict is None else stash.verdict(wait=True).report["live_bytes"]
        stash.close()
        return static, (one + FACTOR * live, peak)


def law(bench, grid):
    print("layers capacity | static: predicted measured | stashed: predicted measured | of static")
    cells = {}
    for layers in grid.layers:
        for capacity in CAPACITIES:
            shape = (layers, f"{capacity:g}")
            case = Case("22", "stash_peak", "bf16", shape, "keeps")
            if not bench.selects(case):
                continue
            static, stashed = cells[layers, capacity] = grid.cell(layers, capacity)
            gain = stashed[1] / static[1]
            note = "" if gain < 1 else "  (nothing leaves)" if layers == 1 else "  (stashing costs memory)"
            figures = [f"{b / MIB:9.2f}" for b in (*static, *stashed)]
            print(
                f"{layers:6} {capacity:8g} | {figures[0]} {figures[1]} | {figures[2]} {figures[3]} | {gain:.2f}{note}"
            )
            bench.record(
                case,
                {"ours": stashed[1] / MIB, "predicted": stashed[0] / MIB, "own static": static[1] / MIB},
                "MiB",
            )
            bench.record(
                Case("22", "static_peak", "bf16", shape, "keeps"),
                {"ours": static[1] / MIB, "predicted": static[0] / MIB},
                "MiB",
            )
    return cells


def plot(bench, cells):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(CAPACITIES), 3.5), layout="constrained")
    for axes, capacity in zip(figure.subplots(1, len(CAPACITIES)), CAPACITIES, strict=True):
        for which, (name, colour) in enumerate((("static", "tab:orange"), ("stashed", "tab:blue"))):
            points = sorted((layers, cell[which]) for (layers, c), cell in cells.items() if c == capacity)
            layers = [layers for layers, _ in points]
            axes.plot(layers, [p[0] / MIB for _, p in points], color=colour, label=f"{name}, predicted")
            axes.plot(layers, [p[1] / MIB for _, p in points], "o", color=colour, label=f"{name}, measured")
        axes.set(title=f"capacity {capacity:g}", xlabel="layers", ylim=(0, None))
    figure.axes[0].set(ylabel="MiB at the peak that groups keep")
    figure.axes[0].legend()
    figure.suptitle("Memory that groups of a stash keep at the peak, and whole buffers")
    path = bench.folder / f"stash_memory_{'cpu' if not bench.cuda else 'cuda'}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (path, path.with_suffix(".png")):
        figure.savefig(each)
        print(f"wrote {each}")


def timed(grid, run):
    """ms of a step, the median; the routing changes from step to step, as its input does."""
    batches = [batch(run.config, grid.device, number) for number in range(4)]
    times = []
    for turn in range(TIMED if grid.bench.cuda else 3):
        run.data = batches[turn % len(batches)]
        if grid.bench.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        grid.compute(run)
        if grid.bench.cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


def zipf(bench, grid):
    """At the largest number of layers: allocated and reserved peaks of everything, weights included, and a step's
    time."""
    layers = grid.layers[-1]
    print("Zipf, capacity, way | allocated MiB, reserved MiB, ms a step")
    for capacity in CAPACITIES[1:]:
        found = {}
        for way in ("own static", "ours", "own dynamic"):
            stash = grid.stash() if way == "ours" else None
            gc.collect()
            if bench.cuda:
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved(grid.device)
            run = grid.run(layers, None if way == "own dynamic" else capacity, stash, "zipf")
            ms = timed(grid, run)
            peak = grid.peak_of(run)
            if stash is not None:
                peak += stash.plan().device_pages * grid.page_bytes
            reserved = torch.cuda.memory_reserved(grid.device) - before if bench.cuda else float("nan")
            found[way] = (peak / MIB, reserved / MIB, ms)
            print(f"{capacity:8g} {way:12} | {peak / MIB:9.1f} {reserved / MIB:9.1f} {ms:9.2f}")
            if stash is not None:
                stash.close()
            del run
        shape = (layers, f"{capacity:g}")
        rows = [("allocated", 0), *([("reserved", 1)] if bench.cuda else [])]
        for what, index in rows:
            case = Case("22", f"stash_zipf_{what}", "bf16", shape, "keeps")
            if bench.selects(case):
                bench.record(case, {way: figures[index] for way, figures in found.items()}, "MiB")
        flops = 18 * grid.config(layers, 1.0).balanced_rows * grid.sizes["hidden"] * grid.sizes["ffn"] * layers
        case = Case("22", "stash_zipf_step", "bf16", shape, "forward+backward", flops=flops)
        if bench.selects(case):
            bench.record(case, {way: 1e3 * figures[2] for way, figures in found.items()}, "us")


def main():
    bench = Bench(__doc__)
    warnings.filterwarnings("ignore", message=".*stashing costs memory.*")  # the table gives the place
    grid = Grid(bench)
    cells = law(bench, grid)
    if len(cells) == len(grid.layers) * len(CAPACITIES):
        plot(bench, cells)
    zipf(bench, grid)
    bench.finish()


if __name__ == "__main__":
    main()
