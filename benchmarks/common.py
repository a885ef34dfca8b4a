"""The benchmarks' harness: times ours beside its peers in one process and appends the rows. It is not a test: nothing
here passes or fails; `report.py` compares the rows with the targets.

    from common import Bench, Case

    bench = Bench(__doc__)                                   # parses --device, --results, --only, --ours
    case = Case("5", "rmsnorm", "bf16", (16384, 4096), "forward", bytes=4 * 16384 * 4096)
    if bench.selects(case):
        w = bench.randn(4096, dtype="bf16")
        plain = lambda x: F.rms_norm(x, (4096,), w, 1e-5)
        bench.compare(
            case,
            {"ours": lambda x: _C.rmsnorm_fwd(x, w, 1e-5), "torch eager": plain, "torch compile": bench.compile(plain)},
            lambda: (bench.randn(16384, 4096, dtype="bf16"),),   # one input set; made again as often as rotation needs
        )
    bench.finish()                                           # exits 1 when a peer failed

A contender is called with one input set and returns what it computed; without gradients unless the direction is
`forward+backward` (its input set is then made with requires_grad, see `training_step`). No figure is stored: a peer is
timed in the same process, or has no row. A case that names bytes is also timed as a `copy_` of the same total bytes;
`ratio` on that row of ours is the fraction of it. Names: op, shape and direction are those of `targets.TARGETS`; a
measured autograd node (not the bare kernel) ends in `_module`.

Method: timing.py; cases that count flops are timed sustained, or with --burst as the others. Columns and TE_COMMIT:
rows.py. Results go to benchmarks/results/<device>.csv, or to --results DIR (merge them later with `report.py --merge
FILE...`)."""

import argparse
import dataclasses
import pathlib
import sys
import traceback

import numpy as np
import nvml
import rows as table
import timing
import torch

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COLUMNS = ("case", "op", "impl", "dtype", "shape", "direction", "p20", "p50", "p80", "unit", "peer", "ratio")
COLUMNS += ("timing", "sm_mhz", "watts")
FASTEST = "max-autotune-no-cudagraphs"  # of torch.compile's modes


@dataclasses.dataclass(frozen=True)
class Case:
    """One row's identity, and the bytes or flops that its floor counts (both 0 only for `keeps`)."""

    case: str
    op: str
    dtype: str
    shape: tuple
    direction: str
    bytes: int = 0
    flops: int = 0

    def __post_init__(self):
        if self.dtype not in table.DTYPES or self.direction not in table.DIRECTIONS:
            raise ValueError(f"{self}: wanted dtype in {table.DTYPES} and direction in {table.DIRECTIONS}")
        if (self.bytes > 0) + (self.flops > 0) != (self.direction != "keeps"):
            raise ValueError(f"{self}: wanted bytes or flops, one of them (neither for keeps)")

    def columns(self):
        shape = "x".join(map(str, self.shape))
        return {"case": self.case, "op": self.op, "dtype": self.dtype, "shape": shape, "direction": self.direction}


class Bench:
    """One benchmark run on one device."""

    chunk = None  # of again.py: whether a case, by its name, is measured in this process

    def __init__(self, description, device=None, options=None):
        """options(parser): adds this benchmark's own arguments; they are in `options`."""
        parser = argparse.ArgumentParser(description=description.split("\n")[0])
        default = device or ("cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--device", type=torch.device, default=torch.device(default))
        parser.add_argument("--results", type=pathlib.Path, default=table.RESULTS, help="folder the rows go to")
        parser.add_argument(
            "--only",
            default="",
            help="only cases whose 'case op dtype shape direction' contains this, or one of A,B,...",
        )
        parser.add_argument("--ours", action="store_true", help="without the peers")
        parser.add_argument("--burst", action="store_true", help="no case is timed sustained")
        parser.add_argument("--no-autotune", action="store_true", help=f"without torch.compile's {FASTEST}")
        parser.add_argument("--samples", type=int, help="of each contender; each default is one of timing.py's")
        if options is not None:
            options(parser)
        args = self.options = parser.parse_args()
        self.device, self._only, self._failed, self._ours = args.device, args.only.split(","), [], args.ours
        stem, self._machine = table.machine(self.device)  # first: a run that cannot be named is not started
        self.folder, self._path = args.results, args.results / f"{stem}.csv"
        self.cuda = self.device.type == "cuda"
        self._gauge = nvml.Gauge(self.device)
        torch.manual_seed(0)

    def selects(self, case):
        name = " ".join(case.columns().values())
        return any(part in name for part in self._only) and (Bench.chunk is None or Bench.chunk(name))

    def randn(self, *shape, dtype, grad=False):
        """N(0, 1) on the device: zeros would flatter a GEMM by 13%."""
        return torch.randn(shape, device=self.device, dtype=TORCH_DTYPES[dtype], requires_grad=grad)

    def compile(self, function, mode=None):
        """The torch.compile peer, specialised to its shapes; a fresh cache, so that no case reaches a recompile
        limit."""
        torch.compiler.reset()
        return torch.compile(function, dynamic=False, mode=mode)

    def compiled(self, make):
        """torch.compile's peers on CUDA, in its default mode and its fastest, of make(), a function or a module."""
        modes = {"torch compile": None} if self.cuda else {}
        if self.cuda and not self.options.no_autotune:
            modes["torch compile autotuned"] = FASTEST
        return {name: self.compile(make(), mode) for name, mode in modes.items()}

    def compare(self, case, contenders, make, prepare=None):
        """Device time on CUDA, wall time on a CPU; appends and prints the rows, returns {impl: p50 in us}. prepare: is
        called with the inputs before each call, untimed, where contenders write over them."""
        contenders = dict(contenders)
        if case.bytes:
            contenders["copy_"] = self._copy(case.bytes)
        if prepare is not None:
            return self._measure(case, contenders, make, "prepared", prepare=prepare)
        if case.flops and not self.options.burst:
            return self._measure(case, contenders, make, "sustained")
        return self._measure(case, contenders, make, "burst" if self.cuda else "wall")

    def compare_host(self, case, contenders, make):
        """As compare, but the host's wall time per call; on a CPU that includes the computing."""
        return self._measure(case, contenders, make, "host" if self.cuda else "wall", turns=1)

    def record(self, case, figures, unit):
        """Appends figures that are counted, not sampled ({impl: value}, for example bytes kept in MiB)."""
        self._write(case, {name: [value] for name, value in figures.items()}, unit)

    def finish(self):
        if self._failed:
            sys.exit("these peers failed and have no rows:\n  " + "\n  ".join(self._failed))

    def _copy(self, total):
        """A copy_ that reads and writes `total` bytes in all, rotating through buffers of its own."""
        half = max(1, total // 2)

        def make():
            return torch.randint(256, (half,), dtype=torch.uint8, device=self.device), torch.empty(
                half, dtype=torch.uint8, device=self.device
            )

        sets = timing.rotate(make, self.device)
        return lambda source, target: target.copy_(source), sets

    def _sampler(self, kind, run, sets, prepare):
        """Warms `run` up; returns what takes one sample of it."""
        if kind == "prepared":
            return timing.prepared_sampler(run, sets, prepare)
        if not self.cuda:
            return timing.cpu_sampler(run, sets, timing.SUSTAINED_S if kind == "sustained" else timing.CPU_ROUND_S)
        if kind == "sustained":
            return timing.Sustained(run, sets, self._gauge)
        return timing.host_sampler(run, sets) if kind == "host" else timing.cuda_sampler(run, sets, self._gauge)

    def _rounds(self, kind):
        if self.options.samples:
            return self.options.samples
        if not self.cuda:
            return timing.CPU_ROUNDS
        return timing.SUSTAINED_ROUNDS if kind == "sustained" else timing.CUDA_ROUNDS

    def _measure(self, case, contenders, make, kind, turns=None, prepare=None):
        """kind: a timing of rows.py."""
        contenders = {name: run for name, run in contenders.items() if name == "ours" or not self._ours}
        sets = [make() for _ in range(turns)] if turns else timing.rotate(make, self.device)
        samplers, samples = {}, {}
        with torch.set_grad_enabled(case.direction == "forward+backward"):
            for name, run in contenders.items():
                alone = isinstance(run, tuple)  # with input sets of its own, which it does not write over
                run, own_sets = run if alone else (run, sets)
                try:
                    samplers[name] = self._sampler("burst" if alone and prepare else kind, run, own_sets, prepare)
                except Exception:
                    if name == "ours":
                        raise
                    traceback.print_exc()
                    self._failed.append(f"{name}: {' '.join(case.columns().values())}")
            samples.update(timing.interleave(samplers, self._rounds(kind)))
        readings = {name: getattr(one, "readings", []) for name, one in samplers.items()}
        return self._write(case, {name: samples[name] for name in contenders if name in samples}, "us", kind, readings)

    def _write(self, case, samples, unit, kind="", readings=None):
        """Appends and prints the rows. kind: a timing of rows.py; readings: {impl: [(MHz, W), ...]}."""
        points = {name: [table.number(p) for p in np.percentile(s, [20, 50, 80])] for name, s in samples.items()}
        count = case.bytes or case.flops or round(2**20 * float(points["ours"][1]))
        base = dict(**case.columns(), unit=unit, bytes_or_flops=count, **self._machine, date=table.now(), timing=kind)
        rows = []
        for name, (p20, p50, p80) in points.items():
            row = dict(base, impl=name, p20=p20, p50=p50, p80=p80, peer="", ratio="", sm_mhz="", watts="")
            if readings and readings.get(name):
                row["sm_mhz"], row["watts"] = (table.number(float(one)) for one in np.median(readings[name], 0))
            peers = [peer for peer in points if peer != "ours"] if name == "ours" else []
            for peer in peers:
                rows.append(dict(row, peer=peer, ratio=table.number(float(points[peer][1]) / float(p50))))
            if not peers:
                rows.append(row)
        table.append(self._path, rows)
        for row in rows:
            print("  ".join(str(row[column]) for column in COLUMNS), flush=True)
        return {name: float(p50) for name, (_, p50, _) in points.items()}


def training_step(module, parameters=None):
    """A contender for `forward+backward`: (x, dy) -> drops gradients (else accumulation is timed too), runs both."""
    parameters = list(module.parameters() if parameters is None else parameters)

    def step(x, dy):
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        module(x).backward(dy)

    return step


def keeps_mib(module, x):
    """MiB of the distinct storages that saved-tensor hooks see, less the parameters, their FP8 copies and the module's
    own input."""
    seen = []  # tensors, not addresses: a freed storage's address could come back

    def pack(t):
        seen.append(t.detach())  # an output itself would hold the node that holds it, for good
        return seen[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters(), *module.buffers())}
    transposed = {(torch.uint8, tuple(p.shape)[::-1]) for p in module.parameters() if p.dim() == 2}
    seen = [t for t in seen if (t.dtype, tuple(t.shape)) not in transposed]  # what dgrad reads of a weight
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in seen}
    del y
    return sum(size for address, size in kept.items() if address not in own) / 2**20
