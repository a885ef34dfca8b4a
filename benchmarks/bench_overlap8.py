"""Rank 0's part of tensor parallelism over eight ranks, on two devices (targets.py case M): the first process computes
and pushes by the plan of rank 0 of 8, the second one acts as its seven peers, which push and receive but compute
nothing. Pieces, products and the link's rate are those of eight ranks. Peers push to rank 0 one after the other, in
their turns. Partial sums, which real peers would compute at rank 0's pace, are pushed no earlier than the arrival of
rank 0's own push of the previous turn.

    torchrun --nproc-per-node=2 bench_overlap8.py                    # each process on its own CUDA device
    torchrun --nproc-per-node=2 bench_overlap8.py --device cpu       # small shapes: checks that it runs

`gemm` is the rank's product alone, `push` seven shards to a peer alone, `floor` the best time of the two:
max(gemm, push + gemm / 8) + 15 us, and for a scatter the sum of eight parts at 4.1 TB/s. The first call of a
sample is not timed: peers come to it early. Results are checked."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.nn.functional as F
from common import Case
from engine_calls import Peer
from rank_bench import RankBench
from timing import interleave

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.symmetric import without_multicast
from transformer_engine.pytorch.functional.linear import linear

RANKS = 8
SHAPES = {  # tokens of all, N, K of all
    "gather_linear": [
        (8192, 57344, 8192),
        (16384, 57344, 8192),
        (4096, 57344, 8192),
        (8192, 10240, 8192),
        (8192, 28672, 4096),
    ],
    "linear_scatter": [(8192, 8192, 28672)],
}
CPU = {"gather_linear": [(256, 128, 64)], "linear_scatter": [(256, 64, 128)]}
# One call at a time takes it: the first of its kind (csrc/core/comm_buffer_pool.h).
SLOTS = {"gather_linear": 0, "linear_scatter": 6}
CALLS = 4  # calls of a sample: the peers' work for them must fit into a stream
SUM_BYTES_PER_US = 4.1e6


class Channel:
    """Memory that both processes map: words, and slots of one size; each process has one for every rank."""

    def __init__(self, bench, size):
        self.bench, self.size = bench, size
        # One mapping for each rank of a process: CUDA registers memory of the host once.
        self.words = self._map(_C.peer_words_bytes(RANKS), times=RANKS - 1)
        self.memory, here, there = self._slots(len(SLOTS) * RANKS * size)
        # Rank r's part of a slot, as this process sees it: rank 0's in the memory of the first process, others' in the
        # second's.
        base = [here, there] if bench.rank == 0 else [there, here]
        self.addresses = {
            slot: [base[int(rank > 0)] + (i * RANKS + rank) * size for rank in range(RANKS)]
            for i, slot in enumerate(SLOTS.values())
        }

    def _map(self, size, each=False, times=1):
        """Host memory of the first process, or of each."""
        paths = [None, None]
        with tempfile.NamedTemporaryFile(prefix="te_overlap8_", dir="/dev/shm") as file:
            file.truncate(size)
            dist.all_gather_object(paths, file.name)
            used = (paths if each else paths[:1]) * times
            mapped = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in used]
            dist.barrier()
        return mapped

    def _slots(self, size):
        """This process's memory, its address, and the address of the other process's memory."""
        there = 1 - self.bench.rank
        if not self.bench.cuda:
            mapped = self._map(size, each=True)
            self.kept = mapped[there]
            return mapped[self.bench.rank], mapped[self.bench.rank].data_ptr(), self.kept.data_ptr()
        made = symm_mem.empty(size, dtype=torch.uint8, device=self.bench.device)
        with without_multicast():
            self.kept = symm_mem.rendezvous(made, dist.group.WORLD.group_name)
        return made, made.data_ptr(), self.kept.buffer_ptrs[there]

    def other(self, like):
        """Memory of the other process, in the form of a tensor."""
        if not self.bench.cuda:
            return torch.empty_like(like)
        return self.kept.get_buffer(1 - self.bench.rank, tuple(like.shape), like.dtype)

    def part_of_rank0(self, slot):
        first = list(SLOTS.values()).index(slot) * RANKS * self.size
        return self.memory[first : first + self.size]


class Rank0:
    """The first process: the calls of a rank of eight."""

    def __init__(self, bench, channel):
        self.bench, self.group = bench, f"eight ranks, {id(channel)}"
        self.memory = channel
        self.channel = _C.PeerChannel(self.group, bench.device, RANKS, 0, channel.words[0], 60.0, self._grow)

    def _grow(self, slot, size, text):
        return self.memory.part_of_rank0(slot), self.memory.addresses[slot], self.memory

    def tp_comm(self, op):
        mode = 1 if op == "gather_linear" else 2
        return _C.GroupTPComm(mode, True, 1, RANKS, self.group, 0, 1)


class Peers:
    """The second process: the other seven."""

    def __init__(self, bench, channel):
        self.bench, self.channel = bench, channel
        self.all = {rank: Peer(RANKS, rank, channel.words[rank - 1], bench.device) for rank in range(1, RANKS)}
        for slot, addresses in channel.addresses.items():
            for peer in self.all.values():
                peer.slot(slot, addresses, channel.size)
        self.streams = [torch.cuda.Stream() for _ in range(2)] if bench.cuda else [None, None]

    def play(self, op, text, shards):
        """One call of all peers. shards: the data that each rank pushes to rank 0."""
        slot = SLOTS[op]
        pushing, receiving = self.streams
        for peer in self.all.values():
            peer.begin(slot, text)
        for step in range(1, RANKS):
            if op == "linear_scatter" and step > 1:
                self.all[step - 1].receive(slot, 0, pushing)
            rank = RANKS - step  # whose turn it is to push to rank 0
            self.all[rank].push(slot, 0, rank * shards[rank].nbytes, shards[rank], pushing)
        for rank in self.all if op == "gather_linear" else [RANKS - 1]:
            self.all[rank].receive(slot, 0, receiving)

    def close(self):
        for peer in self.all.values():
            peer.close()


class Call:
    """One shape on both processes."""

    def __init__(self, bench, channel, side, op, m, n, k):
        self.bench, self.side, self.op = bench, side, op
        gather = op == "gather_linear"
        n, k = (n // RANKS, k) if gather else (n, k // RANKS)
        width = k if gather else n  # bytes on the link
        torch.manual_seed(5)
        self.shards = [bench.randn(m // RANKS, width, dtype="bf16") for _ in range(RANKS)]
        self.weight = bench.randn(n, k, dtype="bf16")
        self.x = torch.cat(self.shards) if gather else bench.randn(m, k, dtype="bf16")
        shape = [m // RANKS, k] if gather else [m, n]
        self.text = f"{'gather, product' if gather else 'product, scatter'} (forward) BFloat16 {shape}"
        self.sum_bytes = 0 if gather else (RANKS + 1) * self.shards[0].nbytes
        if bench.rank == 0:
            self.tp_comm = side.tp_comm(op)
            self.mine = self.shards[0] if gather else self.x
            self.target = channel.other(self.shards[0])

    def run(self):
        with torch.no_grad():
            return linear(self.mine, self.weight, tp_comm=self.tp_comm)

    def push(self):
        for _ in range(1, RANKS):
            self.target.copy_(self.shards[0])

    def with_peers(self, calls):
        """The first process continues when the second one has enqueued, or begun, its part of so many calls."""
        if not self.bench.cuda:
            dist.barrier()
        for _ in range(calls if self.bench.rank == 1 else 0):
            self.side.play(self.op, self.text, self.shards)
        if self.bench.cuda:
            dist.barrier()

    def check(self):
        """Compares the result with that of the whole, and with seven peers' known parts."""
        self.bench.together()  # the pushed data has been drawn, on another stream than the pushes
        self.with_peers(1)
        if self.bench.rank != 0:
            return
        got = self.run().float()
        y = F.linear(self.x, self.weight)
        if self.op == "linear_scatter":
            parts = [y[: len(y) // RANKS], *self.shards[1:]]
            y = torch.stack([part.float() for part in parts]).sum(0)
        if not torch.allclose(got, y.float(), rtol=0.02, atol=0.02 * float(y.float().abs().max())):
            raise RuntimeError(f"bench_overlap8: {self.op} of {self.text} is not what the whole makes")

    def samples(self):
        bench = self.bench

        def sample(run, played):
            bench.together()
            if played:
                self.with_peers(CALLS + 1)
            if bench.rank == 1:
                return 0.0
            if bench.cuda:
                torch.cuda._sleep(1_000_000)
            if played:
                run()
            return bench.timed(run, CALLS)

        ways = {
            "ours": lambda: sample(self.run, True),
            "gemm": lambda: sample(lambda: F.linear(self.x, self.weight), False),
            "push": lambda: sample(self.push, False),
        }
        for way in ways.values():
            way()
        found = interleave(ways, bench.rounds)
        both = zip(found["gemm"], found["push"], strict=True)
        extra = 15 * bench.cuda + self.sum_bytes / SUM_BYTES_PER_US
        found["floor"] = [max(g, c + g / RANKS) + extra for g, c in both]
        return found


def main():
    bench = RankBench(__doc__)
    if bench.ranks != 2:
        raise SystemExit("bench_overlap8: wanted two processes, one that measures and one that plays seven peers")
    _C.set_cpu_products("loop")
    shapes = SHAPES if bench.cuda else CPU
    each = [(op, shape) for op, all_of_it in shapes.items() for shape in all_of_it]
    largest = max(m * (k if op == "gather_linear" else n) * 2 for op, (m, n, k) in each)
    channel = Channel(bench, 1 << (largest - 1).bit_length())
    side = (Rank0 if bench.rank == 0 else Peers)(bench, channel)
    for op, (m, n, k) in each:
        case = Case("M", f"{op}_of_8", "bf16", (m, n, k), "forward", flops=2 * m * n * k // RANKS)
        if not bench.selects(case):
            continue
        call = Call(bench, channel, side, op, m, n, k)
        call.check()
        found = call.samples()
        if bench.rank == 0:
            bench._write(case, found, "us")
    bench.together()
    if bench.rank == 1:
        side.close()
    bench.finish()


if __name__ == "__main__":
    main()
