# Checks that need a device: the host waits for nothing in a step, a verdict that is asked for leaves a busy stream
# alone, and a captured step does not drift. Mutants: a counter that is read by the host, synchronize() in reset() or in
# verdict(), pages that a replay does not give back: each turns these red.
import random
import time

import pytest
import torch
from support import randn, refused

from transformer_engine.pytorch.stash import PagedStash

from .cases import ROWS, WIDTH, count, dead_rows_zero, filled, layers_of, made, report, same

LONG = 1_000_000_000  # clock cycles: some 500 ms
LIVES = (0, 3, 17, ROWS)

pytestmark = pytest.mark.gpu


def gradients(module, x, counter, stash=None):
    """Gradients of a step whose dead rows get gradient 0; reads nothing from the device."""
    given = x.detach().requires_grad_()
    y = module(given, counter, stash)
    alive = (torch.arange(ROWS, device=x.device) < counter)[:, None]
    return torch.autograd.grad(y, [given, *module.parameters()], alive.to(y.dtype).expand_as(y))


def steps(stash, scheduled):
    """run(), which is one step of groups and of stash() calls, and its expected result."""
    module, counter = layers_of("cuda", 4, scheduled=scheduled), count(17, "cuda")
    x = dead_rows_zero(randn(ROWS, WIDTH, device="cuda"), 17)
    t = filled(64, 48, torch.uint8, "cuda")

    def run():
        stash.reset()
        found = gradients(module, x, counter, stash)
        handle = stash.stash("handle", [t], counter)
        back = stash.reload(handle, keep=True)[0][:17], stash.reload(handle)[0][:17]
        return [*found, *back, stash.gate().reshape(1).clone()]

    expected = [*gradients(module, x, counter), t[:17], t[:17], torch.zeros(1, device="cuda")]
    return run, expected


@pytest.mark.parametrize("options", [{}, {"device_pages": 3, "host_pages": 64}], ids=["device", "spills"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_the_host_waits_for_nothing(scheduled, options):
    with made("cuda", **options) as stash:
        run, expected = steps(stash, scheduled)
        for _ in range(3):  # creates the pool, the streams and the memory
            run()
            torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(LONG)
            found = run()
            verdict = stash.verdict()
            busy = not torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert busy, "the host waited for the stream"
        assert verdict is None or verdict.ok
        same(found, expected)
        numbers = report(stash)
        assert numbers["flags"] == 0 and (numbers["spilled_bytes"] > 0) == bool(options)


def test_a_verdict_leaves_a_busy_stream_alone():
    with made("cuda", device_pages=2) as stash:
        t = filled(64, 64, torch.uint8, "cuda")
        few, many = count(1, "cuda"), count(64, "cuda")
        stash.stash("fits", [t], few)
        stash.reset()
        torch.cuda.synchronize()
        assert stash.verdict().ok and stash.verdict() is None
        torch.cuda._sleep(LONG)
        lost = stash.stash("lost", [t], many)
        stash.reset()
        began = time.perf_counter()
        early = stash.verdict()
        took, busy = time.perf_counter() - began, not torch.cuda.current_stream().query()
        assert busy and early is None and took < 0.05, (early, took)
        torch.cuda.synchronize()
        late = stash.verdict()
        assert lost and late.flags == ("lost",) and late.group == "lost" and stash.verdict() is None


@pytest.mark.parametrize("scheduled", [True, False])
def test_two_thousand_replays(scheduled):
    """Small counts, and larger ones that spill; each replay starts with its captured reset()."""
    module, counter = layers_of("cuda", 4, scheduled=scheduled), count(0, "cuda")
    x = randn(ROWS, WIDTH, device="cuda")
    inputs = {live: dead_rows_zero(x, live) for live in LIVES}
    expected = {live: gradients(module, inputs[live], count(live, "cuda")) for live in LIVES}
    given = inputs[0].clone()
    choice = random.Random(7)
    with made("cuda", device_pages=5, host_pages=64) as stash:

        def run():
            stash.reset()
            return gradients(module, given, counter, stash)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        groups, seen = None, set()
        for i in range(2000):
            live = choice.choice(LIVES)
            given.copy_(inputs[live])
            counter.fill_(live)
            graph.replay()
            if i % 10:
                continue
            same(results, expected[live], f"replay {i}, {live} rows")
            numbers = report(stash)
            groups = numbers["groups"] if groups is None else groups
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
            assert numbers["groups"] == groups == (3 if scheduled else 4)
            assert numbers["live_bytes"] == groups * live * WIDTH * 4
            seen.add((live, numbers["spilled_bytes"] > 0))
        assert seen == {(0, False), (3, False), (17, True), (ROWS, True)}


def test_a_live_graph_keeps_its_pool():
    """The capture holds the pool's addresses although reset() was called outside of it."""
    with made("cuda", device_pages=16) as stash:  # the step needs 10, "lost" 25
        module, counter = layers_of("cuda", 3), count(17, "cuda")
        x = dead_rows_zero(randn(ROWS, WIDTH, device="cuda"), 17)
        expected = gradients(module, x, counter)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                stash.reset()
                gradients(module, x, counter, stash)
            stash.reset()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = gradients(module, x, counter, stash)
        t = filled(100, 64, torch.uint8, "cuda")
        stash.reset()
        lost = stash.stash("lost", [t], count(100, "cuda"))
        with refused(RuntimeError, "PagedStash.grow", "captured", "recapture=fn"):
            stash.grow()
        for _ in range(2):
            stash.reset()
            graph.replay()
            same(results, expected)
            assert report(stash)["flags"] == 0 and lost


def test_two_streams_at_once():
    """Ten thousand groups are stored and loaded while the compute stream runs ahead."""
    stash = PagedStash(256, device_pages=37, host_pages=16, overflow="raise_at_step_end", device="cuda")
    choice = random.Random(3)
    tensors = [filled(64, 48, torch.uint8, "cuda", seed=i) for i in range(6)]
    counters = [count(live, "cuda") for live in (0, 1, 17, 40, 63, 64)]
    lives = [0, 1, 17, 40, 63, 64]
    held, wrong, cycles, last = {}, torch.zeros((), device="cuda"), 0, 0
    while cycles < 10_000:
        i = choice.randrange(6)
        if i in held:
            (back,) = stash.reload(held.pop(i))
            wrong += (back[: lives[i]] != tensors[i][: lives[i]]).any() | (back[lives[i] :] != 0).any()
            cycles += 1
        else:
            held[i] = stash.stash(i, [tensors[i]], counters[i])
        if not held and cycles - last > 200:
            stash.reset()
            last = cycles
    verdict = stash.close()
    assert float(wrong) == 0 and verdict.ok, (float(wrong), verdict)
