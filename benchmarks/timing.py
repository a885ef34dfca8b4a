"""Times contenders round by round in one process. It does not average: it returns one figure per sample, in us.

Sustained (products, modules, layers). Each sample is at least 100 ms of calls back to back, so that the device works at
the clocks and the power of a training step; the SM clock and the power are read meanwhile (nvml.py). On a CPU the same
by wall time.
Burst (CUDA: what memory's rate bounds). Each sample is one batch of calls between two events, queued after a spin
kernel so that the host's launch cost stays outside; calls under 20 us run as a captured graph of at least 20. Inputs
rotate through `sets`, and the outputs of one turn stay alive, so nothing is read or written twice within one L2's worth
of traffic. Single calls after an idle spin run at clocks that no training step has: products took 2 to 17 % less time.
Prepared. Each call writes over its input: it gets fresh values before, untimed.
Wall (CPU). Each sample repeats the call for at least 50 ms of wall time.
Host (CUDA). Wall time per call of a batch, with one wait at its end."""

import collections
import itertools
import math
import time

import torch

L2_BYTES = 60_000_000  # H200 and H100; a working set below this is rotated
GRAPH_BELOW_US = 20.0
BATCH_US = 1000.0  # a sample's batch lasts about this long, so that an event's resolution (0.5 us) does not show
MAX_GRAPH_CALLS = 256
CUDA_ROUNDS = 51
CPU_ROUNDS = 5
CPU_ROUND_S = 0.05
SUSTAINED_S = 0.1  # a sample's calls, back to back
SUSTAINED_ROUNDS = 11
READ_S = 0.004  # between two readings of clock and power
HOST_CALLS = 100
WARM_S = 0.1


def rotate(make, device):
    """Calls make() (a tuple of tensors, or of objects with nbytes) often enough that one turn through the results
    exceeds twice the L2."""
    first = make()
    if device.type != "cuda":
        return [first]
    size = sum(getattr(t, "nbytes", 0) for t in first)
    turns = min(MAX_GRAPH_CALLS, math.ceil(2 * L2_BYTES / max(size, 1)))
    return [first] + [make() for _ in range(turns - 1)]


class Turns:
    """Calls `run` on the next input set each time and keeps one turn of outputs alive when there is more than one."""

    def __init__(self, run, sets):
        self._run, self._next = run, itertools.cycle(sets)
        self._kept = collections.deque(maxlen=len(sets) if len(sets) > 1 else 0)

    def __call__(self, calls):
        for _ in range(calls):
            self._kept.append(self._run(*next(self._next)))


def _warm(turns, sets):
    end = time.perf_counter() + WARM_S
    turns(max(3, len(sets)))
    while time.perf_counter() < end:
        turns(1)
        torch.cuda.synchronize()


def _device_us(work, host_us, meanwhile=lambda: None):
    """Device time of what work() queues; host_us is an upper estimate of the time work() takes to queue it. meanwhile()
    is called when all is queued."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2000 * (1.5 * host_us + 50)))  # cycles: an SM runs at or below 2000 a microsecond
    start.record()
    work()
    stop.record()
    meanwhile()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(stop)


def _wall_us(work):
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)


def _read(gauge, readings):
    """Adds the clock and the power of this moment, if they can be read."""
    reading = gauge.read()
    if reading is not None:
        readings.append(reading)


def cuda_sampler(run, sets, gauge):
    """Warms `run` up; returns a function that takes one sample of its device time in us per call. Its `readings` are
    clock and power, as gauge.read() finds them during the samples."""
    readings = []

    def sampler(work, host_us, calls):
        def sample():
            return _device_us(work, host_us, lambda: _read(gauge, readings)) / calls

        sample.readings = readings
        return sample

    turns = Turns(run, sets)
    _warm(turns, sets)
    torch.cuda.synchronize()
    host_us = _wall_us(lambda: turns(10))
    device_us = _device_us(lambda: turns(10), host_us) / 10
    if device_us >= GRAPH_BELOW_US:
        calls = min(20, math.ceil(BATCH_US / device_us))
        return sampler(lambda: turns(calls), host_us * calls / 10, calls)
    calls = min(MAX_GRAPH_CALLS, max(20, len(sets), math.ceil(BATCH_US / max(device_us, 1.0))))
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for args in itertools.islice(itertools.cycle(sets), calls):
            outputs.append(run(*args))  # alive together: each call writes its own memory
    graph.replay()
    return sampler(graph.replay, 100.0, calls)


class Sustained:
    """Takes one sample of `run` in us per call, of at least SUSTAINED_S of calls back to back. readings: as
    cuda_sampler's."""

    def __init__(self, run, sets, gauge):
        self._turns, self._gauge, self.readings = Turns(run, sets), gauge, []
        _warm(self._turns, sets)
        torch.cuda.synchronize()
        host_us = _wall_us(lambda: self._turns(10))
        self._calls = math.ceil(1e6 * SUSTAINED_S * 10 / _device_us(lambda: self._turns(10), host_us))

    def __call__(self):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._turns(self._calls)
        stop.record()
        while not stop.query():  # the host has queued all of it, and is ahead
            _read(self._gauge, self.readings)
            time.sleep(READ_S)
        return 1e3 * start.elapsed_time(stop) / self._calls


def prepared_sampler(run, sets, prepare):
    """Returns a function that takes one sample of `run` in us per call; prepare(*inputs) comes before each call,
    untimed. Then other memory is read, so that the L2 holds nothing of it."""
    cuda = sets[0][0].is_cuda
    other = torch.ones(2 * L2_BYTES if cuda else 1, dtype=torch.uint8, device=sets[0][0].device)
    turns = itertools.cycle(sets)

    def one(clock):
        args = next(turns)
        prepare(*args)
        other.max()
        start = clock()
        run(*args)
        return start, clock()

    def on_cpu():
        start, stop = one(time.perf_counter)
        return 1e6 * (stop - start)

    def event():
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def on_cuda():
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2000 * 1.5 * host_us))
        pairs = [one(event) for _ in range(calls)]
        torch.cuda.synchronize()
        return 1e3 * sum(start.elapsed_time(stop) for start, stop in pairs) / calls

    for _ in range(3):
        one(time.perf_counter)
    if not cuda:
        return on_cpu
    calls, host_us = 1, 1000.0
    device_us = on_cuda()
    calls = min(20, math.ceil(BATCH_US / device_us))
    host_us = 100.0 + _wall_us(lambda: [one(event) for _ in range(calls)])
    return on_cuda


def cpu_sampler(run, sets, seconds=CPU_ROUND_S):
    """Warms `run` up; returns a function that takes one sample of its wall time in us per call."""
    turns = Turns(run, sets)
    turns(2)
    repeats = max(1, math.ceil(1e6 * seconds / _wall_us(lambda: turns(1))))
    return lambda: _wall_us(lambda: turns(repeats)) / repeats


def host_sampler(run, sets):
    """Warms `run` up; returns a function that takes one sample of the host's wall time in us per call."""
    turns = Turns(run, sets)
    _warm(turns, sets)

    def batch():
        turns(HOST_CALLS)
        torch.cuda.synchronize()

    def sample():
        torch.cuda.synchronize()
        return _wall_us(batch) / HOST_CALLS

    return sample


def interleave(samplers, rounds):
    """{name: sampler} -> {name: [one figure per round]}; every round samples each contender once, every second round
    in reverse, so that no contender always runs after the same other one."""
    samples = {name: [] for name in samplers}
    for turn in range(rounds):
        for name in list(samplers)[:: -1 if turn % 2 else 1]:
            samples[name].append(samplers[name]())
    return samples
