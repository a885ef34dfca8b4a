"""The time from one stream's write of a word in pinned host memory to the end of another stream's wait for it: the cost
of a hop of the channel to peers (ops/comm/peer.cu), eager and in a graph. One process, one CUDA device; the figure is
the time of a chain of hops there and back, divided by its length."""

import ctypes

import torch
from common import Bench, Case

WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_*_VALUE_32; a wait is for equality
HOPS = 200


class Operation(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_uint32), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64)]
    _fields_ += [("flags", ctypes.c_uint32), ("alias", ctypes.c_uint64), ("pad", ctypes.c_uint64)]


class Words:
    """There and back between two streams, `hops` in all."""

    def __init__(self, host):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.host, self.address = host, host.data_ptr()
        self.there = torch.cuda.Stream()

    def batch(self, stream, *operations):
        made = (Operation * len(operations))(*operations)
        code = self.driver.cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), len(made), made, 0)
        if code != 0:
            raise RuntimeError(f"cuStreamBatchMemOp: CUresult {code}")

    def write(self, word, value):
        return Operation(WRITE, self.address + 64 * word, value, 0, 0, 0)

    def wait(self, word, value):  # and put back
        return Operation(WAIT, self.address + 64 * word, value, 1, 0, 0), self.write(word, 0)

    def hop(self, sender, receiver, word):
        self.batch(sender, self.write(word, 7))
        self.batch(receiver, *self.wait(word, 7))


def chain(words, here):
    """The hops of a batch, forked from `here` and joined with it."""
    words.there.wait_stream(here)
    for _ in range(HOPS // 2):
        words.hop(here, words.there, 0)
        words.hop(words.there, here, 1)
    here.wait_stream(words.there)


def eager(words, start, end):
    torch.cuda._sleep(20_000_000)  # until all of it is queued
    start.record()
    chain(words, torch.cuda.current_stream())
    end.record()


def captured(words):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(words, torch.cuda.current_stream())

    def replay(start, end):
        start.record()
        graph.replay()
        end.record()

    return replay


def median_us(run, rounds=21):
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run(start, end)
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end) / HOPS)
    return sorted(found)[rounds // 2]


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        print("bench_hop: words are awaited by streams of a CUDA device; nothing to measure on the CPU")
        return
    words = Words(torch.zeros(1024, dtype=torch.int32, pin_memory=True))
    for op, run in (("hop", lambda *events: eager(words, *events)), ("hop_captured", captured(words))):
        case = Case("M", op, "fp32", (HOPS,), "forward", bytes=4)
        if bench.selects(case):
            bench.record(case, {"ours": median_us(run)}, "us")
    bench.finish()


if __name__ == "__main__":
    main()
