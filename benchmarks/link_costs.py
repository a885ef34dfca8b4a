"""Measures an entry of transformer_engine/common/ops/comm/costs.cpp between the ranks of a RankBench, which all push to
the next one at once. bench_overlap.py prints it: filling the table is one edit."""

import dataclasses

import engine_calls
import torch
import torch.distributed as dist
import torch.nn.functional as F

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed.symmetric import without_multicast

SIZES = {"cuda": (8192, 57344, 8192), "cpu": (64, 128, 64)}  # tokens of all, N of all, K
WHOLE_WAVES = 12 * 128, 256  # rows of a run, and columns of a tile; there is one tile for each multiprocessor
TINY = 16, 64  # tokens of a rank, width
ROUNDS, CALLS = 11, 5


@dataclasses.dataclass
class Link:
    """The measurements of the ranks, in bytes, floating-point operations and microseconds."""

    flops_per_us: float
    link_bytes_per_us: float
    serial_bytes_per_us: float
    memory_bytes_per_us: float
    launch_us: float
    hop_us: float
    beside: float
    units: int
    tile_rows: int = 128
    tile_cols: int = 256
    least_gathered: int = 0  # these two come from the rows of bench_overlap.py
    least_scattered: int = 0

    def entry(self, kind):
        """A line of kMeasured."""
        fields = ", ".join(f".{name} = {value:.6g}" for name, value in dataclasses.asdict(self).items())
        return f'    {{"{kind}", {{{fields}}}}},'


class Meter:
    def __init__(self, bench):
        self.bench = bench
        self.m, n, self.k = SIZES[bench.device.type]
        self.x = bench.randn(self.m, self.k, dtype="bf16")
        self.weight = bench.randn(n // bench.ranks, self.k, dtype="bf16")
        self.shard = self.x[: self.m // bench.ranks].clone()
        self.target, self.beside = self._of_the_next_rank(), torch.cuda.Stream() if bench.cuda else None

    def _of_the_next_rank(self):
        if not self.bench.cuda:
            return torch.empty_like(self.shard)
        import torch.distributed._symmetric_memory as symm_mem

        self.memory = symm_mem.empty(self.shard.nbytes, dtype=torch.uint8, device=self.bench.device)
        with without_multicast():
            self.handle = symm_mem.rendezvous(self.memory, dist.group.WORLD.group_name)
        to = (self.bench.rank + 1) % self.bench.ranks
        return self.handle.get_buffer(to, tuple(self.shard.shape), torch.bfloat16)

    def us(self, run, calls=CALLS):
        """The median time of the slowest rank."""
        for _ in range(3):
            run()
        samples = [self.bench._sample(run, calls, False) for _ in range(ROUNDS)]
        return sorted(self.bench.largest({"": samples})[""])[ROUNDS // 2]

    def product(self):
        F.linear(self.x, self.weight)

    def push(self):
        self.target.copy_(self.shard)

    def while_other(self, run, other, times):
        """`run` while `times` calls of `other`, which last longer, are on a second stream."""
        if not self.bench.cuda:
            return run

        def both():
            here = torch.cuda.current_stream()
            self.beside.wait_stream(here)
            with torch.cuda.stream(self.beside):
                for _ in range(times):
                    other()
            run()

        return both

    def launch(self):
        """The extra time of a product in two halves, each of whole waves."""
        bench = self.bench
        units, (rows, cols) = self.units(), WHOLE_WAVES if bench.cuda else (16, 4)
        n = cols * max(1, units // (rows // 128 or 1))
        x, weight = bench.randn(2 * rows, self.k, dtype="bf16"), bench.randn(n, self.k, dtype="bf16")
        y = torch.empty(2 * rows, n, dtype=torch.bfloat16, device=bench.device)
        product = engine_calls.Product(weight, x, y)
        whole, *halves = (product.prepared(*ends) for ends in ((0, 2 * rows), (0, rows), (rows, 2 * rows)))
        stream = torch.cuda.current_stream() if bench.cuda else None
        in_two = self.us(lambda: [half(stream) for half in halves])
        return max(in_two - self.us(lambda: whole(stream)), 0.1)

    def hop(self):
        """The cost of rows of other ranks beyond the product, with almost none of them."""
        bench, (tokens, width) = self.bench, TINY
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
        shared = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": dist.group.WORLD}
        divided = te.Linear(width, width * bench.ranks, tp_overlap="chunked", **shared, **options)
        alone = te.Linear(width, width, **options)
        x, whole = (bench.randn(rows, width, dtype="bf16") for rows in (tokens, tokens * bench.ranks))
        with torch.no_grad():
            return max(self.us(lambda: divided(x)) - self.us(lambda: alone(whole)), 0.1)

    def memory_rate(self):
        parts = self.bench.randn(self.bench.ranks, *self.shard.shape, dtype="bf16")
        us = self.us(lambda: torch.ops.te.comm_ordered_sum(parts, None))
        return (self.bench.ranks + 1) * self.shard.nbytes / us

    def units(self):
        if not self.bench.cuda:
            return 4
        return torch.cuda.get_device_properties(self.bench.device).multi_processor_count

    def link(self):
        alone, push = self.us(self.product), self.us(self.push)
        pushes = int(2 * alone / push) + 1
        products = int(2 * CALLS * push / alone) + 1
        beside = self.us(self.while_other(self.product, self.push, pushes), 1)
        link = self.us(self.while_other(lambda: [self.push() for _ in range(CALLS)], self.product, products), 1) / CALLS
        return Link(
            flops_per_us=2 * self.m * self.k * len(self.weight) / alone,
            link_bytes_per_us=self.shard.nbytes / link,
            serial_bytes_per_us=self.shard.nbytes / push,
            memory_bytes_per_us=self.memory_rate(),
            launch_us=self.launch(),
            hop_us=self.hop(),
            beside=max(beside / alone, 1.0),
            units=self.units(),
        )
