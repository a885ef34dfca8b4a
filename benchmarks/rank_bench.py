"""The common part of benchmarks with several ranks: a Bench under torchrun, times of calls in which every rank takes
part, and memory. Each sample's time is that of the slowest rank; memory is that of the largest. Rank 0 writes.

Each sample is a fixed number of calls: ranks that determined the number separately would disagree, and wait forever."""

import os
import pathlib
import sys
import time

import timing
import torch
import torch.distributed as dist
from common import Bench

ROUNDS = {"cuda": 21, "cpu": 3}
QUEUED = 1_000_000  # cycles, half a millisecond and more: longer than a host takes to queue a call


class RankBench(Bench):
    """One run on one rank; results go to <device>x<ranks>.csv."""

    def __init__(self, description, options=None):
        if "LOCAL_RANK" not in os.environ:
            sys.exit("start it by `torchrun --nproc-per-node=2`: it measures several ranks")
        devices, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
        # Ranks that share a device, which NCCL refuses: their memory is a figure, their time is not.
        shared = 0 < devices < int(os.environ["LOCAL_WORLD_SIZE"])
        local = local % devices if devices else local
        super().__init__(description, device=f"cuda:{local}" if torch.cuda.is_available() else None, options=options)
        if self.cuda:
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        # gloo on the CPU besides NCCL: for barriers, and for the ranks' measurements.
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda and not shared else "gloo")
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        where = "on1" if self.cuda and shared else ""
        self._path = self._path.with_name(f"{self._path.stem}x{self.ranks}{where}.csv")
        self.trace = self._path.with_name(f"parallel_memory_{self._path.name}")
        self.rounds = ROUNDS[self.device.type]

    def say(self, *words):
        if self.rank == 0:
            print(*words, flush=True)

    def together(self):
        """No rank continues before all are here with no work left."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))

    def largest(self, samples):
        """{name: samples}, each sample from the rank with the largest value."""
        for name, values in samples.items():
            every = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(every, dist.ReduceOp.MAX)
            samples[name] = every.tolist()
        return samples

    def compare_ranks(self, case, contenders, calls, host=False):
        """Contenders, called with nothing, in turn: device time on CUDA, wall time on a CPU; host: the time until the
        calls are queued. Appends and prints the rows; {impl: p50 in us} on every rank."""
        for run in contenders.values():
            for _ in range(3):
                run()
        samplers = {name: lambda run=run: self._sample(run, calls, host) for name, run in contenders.items()}
        return self._write(case, self.largest(timing.interleave(samplers, self.rounds)), "us")

    def _sample(self, run, calls, host):
        self.together()
        if self.cuda and not host:  # an untimed call: after it the ranks' devices are in step too
            torch.cuda._sleep(QUEUED)
            run()
        return self.timed(run, calls, host)

    def timed(self, run, calls, host=False):
        """Samples of this rank alone."""
        if self.cuda and not host:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(QUEUED * calls)  # the host is ahead: its time is measured by `host`
            start.record()
            for _ in range(calls):
                run()
            stop.record()
            torch.cuda.synchronize()
            return 1e3 * start.elapsed_time(stop) / calls
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e6 * (time.perf_counter() - start) / calls

    def record(self, case, figures, unit):
        self._write(case, self.largest({name: [value] for name, value in figures.items()}), unit)

    def _write(self, case, samples, unit, kind="", readings=None):
        if self.rank == 0:
            return super()._write(case, samples, unit, kind, readings)
        return {name: float(torch.tensor(values).median()) for name, values in samples.items()}

    def memory(self):
        """Bytes at their largest since the last reset_memory(); on a CPU the current memory of the process."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def reset_memory(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_mib(self, run):
        """The peak of one call above the memory before it."""
        run()
        self.together()
        self.reset_memory()
        before = torch.cuda.memory_allocated() if self.cuda else self.memory()
        run()
        self.together()
        return (self.memory() - before) / 2**20

    def finish(self):
        dist.barrier()
        dist.destroy_process_group()
        super().finish()
