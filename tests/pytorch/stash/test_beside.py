# A stash beside calls outside of its steps: probes, validations, warm-ups of captures, graphs that stay, a loop without
# reset(). Each leaves the running step as it was. Mutants of csrc/stash: a store before
# a group's own backward, records kept for ever (forget_records()): each turns tests red.
import contextlib
import gc

import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash import PagedStash

from .cases import LIVE, ROWS, WIDTH, Whole, count, filled, given, layers_of, made, report, same, step


class Model(torch.nn.Module):
    """A stack of layers with a stash, as a module of one argument."""

    def __init__(self, whole):
        super().__init__()
        self.inner, self.whole = whole.module, whole

    def forward(self, x):
        return self.inner(x, self.whole.counter, self.whole.stash)


def forwards(whole, layers, stash):
    """The forward of some layers, whose graph is dropped."""
    y = whole.x.clone().requires_grad_()
    for i in range(layers):
        y = stash.pre_schedule(y)
        with stash.group(i, whole.counter):
            y = whole.module.layers[i](y)
        y = stash.post_schedule(y)
    return y


@pytest.mark.parametrize("where", ["behind", "behind reset", "within"])
@pytest.mark.parametrize("probe", [te.memory_plan, te.explain])
def test_probes(probe, where, device):
    """A probe reports the groups of a step without being one: it passes no entry and takes no page."""
    with made(device) as stash:
        whole = Whole(stash, device)
        whole(), whole()
        if where != "behind":
            stash.reset()
        y = forwards(whole, 2, stash) if where == "within" else None
        before = stash.schedule.position, report(stash)
        found = probe(Model(whole), whole.x.clone().requires_grad_())
        if probe is te.memory_plan:
            assert [row.status for row in found.rows].count(
                "stashed"
            ) == 2  # the last one stays, as its own backward is next
        assert (stash.schedule.position, report(stash)) == before
        if y is not None:  # the step goes on
            with torch.no_grad():
                y.detach()
            z = stash.pre_schedule(y)
            with stash.group(2, whole.counter):
                z = whole.module.layers[2](z)
            stash.post_schedule(z).sum().backward()
            assert stash.verdict(wait=True).ok
            del y, z
        whole(), whole()


def test_a_probe_shows_what_is_kept_without_a_pool(device):
    with made(device, device_pages=None) as stash:
        whole = Whole(stash, device)
        found = te.memory_plan(Model(whole), whole.x.clone().requires_grad_())
        assert not [row for row in found.rows if row.status == "stashed"] and not stash.step.any_group


def test_a_validation_with_gradients(device):
    """After the last backward of a step, and before the next reset()."""
    with made(device) as stash:
        whole = Whole(stash, device)
        whole(), whole()
        for _ in range(2):
            y = forwards(whole, 3, stash)
            assert torch.equal(y[:LIVE], whole.expected[0])
        numbers = report(stash)
        assert numbers["groups"] == 2 and numbers["device_in_use"] == 0
        whole()
        y.sum().backward()  # of a step that has ended
        whole()
        with refused(RuntimeError, "the backward of group 2, microbatch 1 came as entry 6", "step is over"):
            forwards(whole, 3, stash).sum().backward()
        whole(), whole()


def test_a_validation_that_fails(device):
    with made(device) as stash:
        whole = Whole(stash, device)
        whole(), whole()
        stash.pre_schedule(whole.x.clone().requires_grad_())
        with refused(RuntimeError, "pre_schedule", "called twice"):
            forwards(whole, 3, stash)
        whole(), whole()


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("first", [False, True])
def test_bump_with_graphs_that_stay(first, scheduled, device):
    """Backwards that retain the graph load groups in the same order: last in, first out."""
    with made(device, policy="bump", page_bytes=512, device_pages=200) as stash:
        module, x, counter = layers_of(device, 2, scheduled=scheduled), given(device), count(LIVE, device)
        expected, _ = step(module, [x], [counter])
        for k in range(4):
            stash.reset()
            module.zero_grad(set_to_none=True)
            leaf = x.clone().requires_grad_()
            y = module(leaf, counter, stash)
            y[:LIVE].sum().backward(retain_graph=first or k > 0)
            same([leaf.grad[:LIVE], *(p.grad for p in module.parameters())], expected[1:])
            verdict = stash.verdict(wait=True)
            assert verdict.ok and float(stash.gate()) == 0, (k, verdict)
            del y


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_loop_without_reset(scheduled, device):
    """It gets a warning, and recording ends."""
    with made(device, device_pages=None) as stash:
        module, x, counter = layers_of(device, 1, scheduled=scheduled), given(device), count(LIVE, device)

        def once():
            module(x.clone().requires_grad_(), counter, stash).sum().backward()

        for _ in range(1024):
            once()
        with pytest.warns(
            UserWarning, match="Without reset.. the first step never ends.*call reset.. before each step"
        ):
            once()
        for _ in range(10):
            once()
        assert not stash.step.sizes and not stash.schedule.entries and len(stash.step.trace) == 0
        stash.reset()
        once()
        stash.reset()
        assert stash.plan().peak_pages == (0 if scheduled else 2)


def test_a_device_that_is_not_there():
    for name in ("cuda:0", "cuda") if not torch.cuda.is_available() else (f"cuda:{torch.cuda.device_count()}",):
        with refused(ValueError, "PagedStash", "'device'", name, f"{torch.cuda.device_count()} CUDA devices", "'cpu'"):
            PagedStash(device=name)


class Captured(_C.StashStreams):
    """Events that count as captured while `on`."""

    on, works = False, ()

    def run(self, stream, work, label, after):
        work(self.current())
        self.works = [*self.works, work]
        return _C.StashEvent(stream, None, label, self.on)

    def now(self, label):
        return _C.StashEvent("compute", None, label, self.on)

    def wait(self, event):
        pass


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_pool_is_captured_with_its_first_call(what):
    """It does not matter where reset() was called."""
    with made("cpu", device_pages=40) as stash:
        streams = stash.streams = Captured(stash.device)
        t = filled(100, 64, torch.uint8, "cpu")
        streams.on = what == "store"
        handle = stash.stash("a", [t], count(100, "cpu"))
        streams.on = True
        if what == "load":
            stash.reload(handle)
        streams.on = False
        lost = [stash.stash(i, [t], count(100, "cpu")) for i in range(2)]
        assert not stash.verdict(wait=True).ok and lost
        with refused(RuntimeError, "PagedStash.grow", "captured", "recapture=fn"):
            stash.grow()
        again = []
        assert stash.grow(recapture=lambda: again.append(1)) and again
        gc.collect()


def test_replays_are_named_by_the_captured_step():
    """Python calls no store in a step of replays; its numbers are those of the captured stores."""
    with made("cpu", device_pages=40) as stash:
        streams = stash.streams = Captured(stash.device)
        t = filled(100, 64, torch.uint8, "cpu")
        eager = stash.stash("eager", [t[:1].clone()], count(1, "cpu"))
        stash.reset()
        streams.on, streams.works = True, ()
        handles = [stash.stash(name, [t], count(100, "cpu")) for name in ("first", "second")]
        streams.on = False
        assert stash.verdict(wait=True).group == "second"
        for _ in range(2):
            stash.reset()
            for work in streams.works[:2]:
                work(streams.current())
            verdict = stash.verdict(wait=True)
            assert verdict.flags == ("lost",) and verdict.group == "second"
        stash.reset()
        assert stash.verdict().group == "second" and stash.verdict(wait=True).ok
        del handles, eager


def test_the_first_step(device):
    """verdict() and plan() work before there is a pool."""
    with made(device, device_pages=None, page_bytes=128, factor=1.0) as stash:
        whole = Whole(stash, device)
        with refused(RuntimeError, "PagedStash.plan", "no step with groups"):
            stash.plan()
        stash.reset()
        found, _ = step(whole.module, [whole.x], [whole.counter], stash)
        same(found, whole.expected)
        verdict = stash.verdict(wait=True)
        assert verdict.ok and verdict.step == 1 and verdict.report["groups"] == 0 and stash.verdict() is None
        assert verdict.report["flagged_entry"] == -1 and verdict.group is None
        plan = stash.plan()
        stash.reset()
        assert stash.plan().peak_pages == plan.peak_pages == plan.device_pages
        whole()
        assert stash.close().ok


def test_numbers_of_steps(device):
    """Each step has a number of its own, also after grow()."""
    with made(device, device_pages=None, factor=1.0, page_bytes=128) as stash:
        whole, t, numbers = Whole(stash, device), filled(100, 64, torch.uint8, device), []

        def told():
            numbers.append(stash.verdict(wait=True).step)

        told()
        for _ in range(2):
            stash.reset()
            step(whole.module, [whole.x], [whole.counter], stash)
            told()
        for _ in range(2):
            t = t.repeat(2, 1)
            stash.reset()
            handle = stash.stash("a", [t], count(len(t), device))
            told()
            stash.grow()
            told()
            stash.rerun(lambda: None)
            told()
            stash.reset()
            stash.reset()
            told()
            assert handle
        assert numbers == sorted(set(numbers)) and numbers[:3] == [0, 1, 2]


@pytest.mark.parametrize("kept", ["before the pool", "over grow()"])
def test_one_gate_for_the_life(kept, device):
    """An optimizer looks it up once and has the gate of every later pool."""
    with made(device, device_pages=None, factor=1.0, page_bytes=128) as stash:
        module, x = layers_of(device, 2), randn(ROWS, WIDTH, device=device)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
        gate = stash.gate() if kept == "before the pool" else None
        for number, rows in enumerate((LIVE, LIVE, ROWS, ROWS, LIVE)):
            stash.reset()
            step(module, [x], [count(rows, device)], stash)
            gate = optimizer.found_inf = stash.gate() if gate is None else gate
            before = [p.detach().clone() for p in module.parameters()]
            optimizer.step()
            moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
            assert all(moved) if number != 2 else not any(moved)
            assert all(bool(p.isfinite().all()) for p in module.parameters())
            assert float(gate) == (number == 2) and stash.gate() is gate
            if number == 2:
                module.zero_grad(set_to_none=True)
                stash.grow()
                assert float(gate) == 0
                stash.rerun(lambda: step(module, [x], [count(ROWS, device)], stash))
                assert float(gate) == 0


class Fails(torch.nn.Module):
    """A layer that raises between its group and post_schedule() while `fails` is set."""

    def __init__(self, number, stash, device):
        super().__init__()
        self.number, self.stash, self.fails = number, stash, False
        self.mlp = te.LayerNormMLP(64, 128, device=device)

    def forward(self, x, counter):
        x = self.stash.pre_schedule(x)
        with self.stash.group(self.number, counter):
            x = self.mlp(x)
        if self.fails:
            raise KeyError("a user's")
        return self.stash.post_schedule(x)


def test_a_capture_that_failed(device):
    """The failed pass ends, and the next capture starts a step of its own."""
    with contextlib.closing(PagedStash(page_bytes=4096, device=device, factor=9.0)) as stash:
        layers = [Fails(i, stash, device) for i in range(2)]

        def sample():
            return randn(256, 64, device=device).requires_grad_(), torch.tensor([50], device=device)

        stash.schedule_from_order([1, -1], layers_per_chunk=2)
        stash.reset()
        y, counter = sample()
        for layer in layers:
            y = layer(y, counter)
        y[:50].sum().backward()
        stash.reset()
        options = {"_order": [1, -1], "_num_layers_per_chunk": [2]}
        layers[1].fails = True
        with pytest.raises(KeyError, match="a user's"):
            te.make_graphed_callables(tuple(layers), (sample(), sample()), **options)
        layers[1].fails = False
        te.make_graphed_callables(tuple(layers), (sample(), sample()), **options)
