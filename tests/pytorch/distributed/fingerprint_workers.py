# Ranks that say what they do without waiting for each other (csrc/distributed/fingerprints.h). On CPUs they do it
# beside a gloo group, whose communicators have no abort; over NCCL by modules that disagree. No test here: a worker
# returns what it found.
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .parallel_edge_workers import column, mlp, said

RECORDS = 1024  # FingerprintRing::kRecords


class Posts:
    """Of one group."""

    def __init__(self, group=None):
        self.group = dist.new_group() if group is None else group

    def __call__(self, op="group_gather", sizes=(4, 8), how=0, dtype=torch.float32, times=1):
        for _ in range(times):
            _C.post_fingerprint(self.group.group_name, torch.device("cpu"), op, how, dtype, list(sizes))

    def heard(self, wanted=True):
        """The error that this rank raises within 20 seconds; if none is expected, within one second."""
        name, until = self.group.group_name, time.monotonic() + (20 if wanted else 1)
        while time.monotonic() < until:
            words = said(lambda: _C.refuse_disagreement(name))
            if words != "nothing":
                return words
            time.sleep(0.01)
        return "nothing"


def equal(rank):
    """More than the ring holds, one rank far ahead of the other, several threads' groups beside each other."""
    first, second = Posts(), Posts()
    for number in range(3 * RECORDS):
        first(sizes=(number, 8))
        if rank and number % 500 == 0:
            time.sleep(0.05)
        if number % 3 == 0:
            second("group_sum", sizes=())
    first("sizes of more than twelve dimensions", sizes=range(1, 15))
    dist.barrier()
    found = [posts.heard(wanted=False) for posts in (first, second)]
    for posts in (first, second):  # and they were compared
        posts(sizes=(rank,))
    return found, [posts.heard()[:10] for posts in (first, second)]


def different(rank):
    """{what: the error that this rank raises} where the ranks differ in one thing."""
    found = {}
    for what, mine in {
        "sizes": {"sizes": (4, 8 + rank)},
        "dtype": {"dtype": (torch.float32, torch.int32)[rank]},
        "op": {"op": ("group_gather", "group_sum")[rank]},
        "how": {"how": rank},
        "raised": {"how": -rank},
    }.items():
        posts = Posts()
        posts(times=3)
        posts(**mine)
        found[what] = posts.heard()
        found[f"{what}, the next call"] = said(posts)
    return found


def long_ago(rank):
    """A call that differed has left the ring before the ranks find each other's rings."""
    posts = Posts()
    posts(sizes=(rank,))
    posts(times=2 * RECORDS)
    return posts.heard()


def captured(rank):
    """Calls after a capture on one rank are not compared: a replay of that rank may post the same calls later."""
    posts = Posts()
    posts(times=3)
    time.sleep(1)  # in which the ranks have met
    if rank == 0:
        _C.stop_comparing(posts.group.group_name, torch.device("cpu"))
    dist.barrier()
    posts(sizes=(rank,), times=3)
    return posts.heard(wanted=False)


def made_again(rank):
    """A group of the same name in the same store as an earlier group, which still exists and has posted other calls:
    the two groups' calls are not compared with each other."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    found = []
    kept = []
    for calls in (3 + rank, 7):
        made = dist.ProcessGroup(store, rank, 2)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(f"gloo{calls == 7}", store), rank, 2, timedelta(seconds=30))
        made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        made._set_group_name("made_again")
        dist.distributed_c10d._register_process_group("made_again", made)
        posts = Posts(made)
        posts(times=calls, sizes=(calls,) if calls == 7 else (4,))
        found.append(posts.heard(wanted=False))
        dist.distributed_c10d._unregister_process_group("made_again")
        kept.append(made)
    return found


def forked(rank):
    """A child of a rank writes nothing into the rank's ring."""
    posts = Posts()
    posts(times=2)
    child = os.fork()
    if child == 0:
        posts(f"the child of rank {rank}")
        os._exit(0)
    os.waitpid(child, 0)
    posts(times=2)
    found = posts.heard(wanted=False)
    posts(sizes=(rank,))  # and they were compared
    return found, posts.heard()[:10]


def cost(rank):
    """Microseconds of one call from Python, the least of several rounds."""
    posts = Posts()
    name, device, sizes = posts.group.group_name, torch.device("cpu"), [4096, 8, 128]
    rounds = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(200):
            _C.post_fingerprint(name, device, "group_gather", 0, torch.float32, sizes)
        rounds.append((time.perf_counter() - begun) / 200 * 1e6)
    return min(rounds)


WORKERS = (equal, different, long_ago, captured, made_again, forked, cost)


def heard_over_nccl(call, x):
    """The first ValueError of `call(x)` within 30 seconds, and what else it raised before."""
    until, others = time.monotonic() + 30, []
    while time.monotonic() < until:
        words = said(lambda: (call(x), torch.cuda.synchronize()))
        if words.startswith("ValueError"):
            return words, others
        if words != "nothing":
            others.append(words)
        time.sleep(0.02)
    return "nothing", others


def disagree(what, rank, good):
    """(the last error of this rank, what it raised before, whether a new group works, seconds) of modules."""
    group = dist.new_group()
    module, two = column(tp_group=group), mlp(tp_group=group)
    module(good).sum().backward()
    torch.cuda.synchronize()
    begun, tokens = time.monotonic(), good.reshape(-1, 1, 32)
    first = {
        "tokens": lambda: module(good[: 64 * (rank + 1)]),
        "dtype": lambda: module(good) if rank else torch.ops.te.group_sum(good.bfloat16(), group.group_name, 2),
        "layer": lambda: module(good) if rank else two(tokens),
        "backward": lambda: module(good).sum().backward() if rank else module(good),
        "error": lambda: two(tokens if rank else tokens[..., :31]),
        "sum": lambda: torch.ops.te.group_sum(good[: 64 * (rank + 1)], group.group_name, 2),
        "region": lambda: te.distributed.gather_from_sequence_parallel_region(good[: 64 * (rank + 1)], group),
    }[what]
    told = said(lambda: (first(), torch.cuda.synchronize()))
    words, others = (told, []) if told.startswith("ValueError: the ranks") else heard_over_nccl(module, good)
    seconds = time.monotonic() - begun
    works = column(tp_group=dist.new_group())(good).shape == (256, 16)
    torch.cuda.synchronize()
    return words, [told, *others], works, seconds


def over_nccl(rank):
    good = torch.randn(128, 32, device=here())
    cases = ("tokens", "dtype", "layer", "backward", "error", "sum", "region")
    return {what: disagree(what, rank, good) for what in cases}
