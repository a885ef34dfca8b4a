# Delayed scaling around a step that is lost: a step that runs again, and every step after one that the gate has kept
# out, give the bits of a run in which nothing was lost.
import copy

import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.stash import manager

from .cases import LIVE, count, filled, made

pytestmark = pytest.mark.usefixtures("fp8_left_off")
WIDTH, ROWS, STEPS, BAD = 32, 16, 6, 2
RULES = {
    "longest": {"amax_history_len": 4},
    "most recent": {"amax_history_len": 1, "amax_compute_algo": "most_recent"},
    "own": {"amax_history_len": 3, "amax_compute_algo": lambda history: history.amax(0)},
}


def modules(device):
    torch.manual_seed(0)
    how = {"bias": False, "normalization": "RMSNorm", "device": device}
    return torch.nn.ModuleList(te.LayerNormMLP(WIDTH, 48, **how) for _ in range(3))


def step(layers, x, recipe, stash=None):
    layers.zero_grad(set_to_none=True)
    y = x.clone().requires_grad_()
    for i, layer in enumerate(layers):
        with te.autocast(recipe=recipe):
            if stash is None:
                y = layer(y)
            else:
                with stash.group(i, count(ROWS, x.device)):
                    y = layer(y)
    y.sum().backward()


def assert_same_state(first, second, what):
    for a, b in zip(first, second, strict=True):
        for key in ("scaling_fwd", "scaling_bwd"):
            mine, other = a.fp8_meta[key], b.fp8_meta[key]
            assert torch.equal(mine.scale, other.scale) and torch.equal(mine.amax_history, other.amax_history), what


def assert_same_step(first, second, what):
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), what
    assert_same_state(first, second, what)


def a_bad_step(layers, x, recipe, small):
    small.reset()
    step(layers, x, recipe, small)
    assert layers[0].fc1_weight.grad.isnan().any()


@pytest.mark.parametrize("bad", [0, BAD])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_runs_again(rule, bad, device):
    """Also the first step, which creates the scaling states."""
    first, recipe = modules(device), R.DelayedScaling(**RULES[rule])
    second = copy.deepcopy(first)
    with made(device, device_pages=2) as small:
        small.register(first)
        for k in range(STEPS):
            x = randn(ROWS, WIDTH, device=device)
            if k == bad:
                a_bad_step(first, x, recipe, small)
                first.zero_grad(set_to_none=True)
                small.grow()
                small.rerun(lambda x=x: step(first, x, recipe, small))
                assert small.verdict(wait=True).ok
            else:
                step(first, x, recipe)
            step(second, x, recipe)
            assert_same_step(first, second, k)


@pytest.mark.parametrize("bad", [0, BAD])
@pytest.mark.parametrize("told", ["reset", "gate", "verdict", "close"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_the_gate_keeps_out(rule, told, bad, device):
    """It leaves no amax, whichever call restores them first; a good step leaves all amaxes."""
    first, recipe = modules(device), R.DelayedScaling(**RULES[rule])
    second = copy.deepcopy(first)
    with made(device) as stash, made(device, device_pages=2) as small:
        stash.register(first)
        small.register(first)
        for k in range(STEPS):
            x = randn(ROWS, WIDTH, device=device)
            if k == bad:
                a_bad_step(first, x, recipe, small)
                {"reset": small.reset, "gate": small.gate, "verdict": lambda: small.verdict(wait=True)}.get(
                    told, small.close
                )()
                if k:
                    assert_same_state(first, second, "after the bad step")
                continue
            stash.reset()
            step(first, x, recipe, stash)
            assert float(stash.gate()) == 0
            step(second, x, recipe)
            assert_same_step(first, second, k)


def test_a_bad_step_that_is_replayed(device, monkeypatch):
    """A captured reset() copies on the device, also in replays; the host's random states continue."""
    layers, recipe, drawn = modules(device), R.DelayedScaling(amax_history_len=4), []
    x, t = randn(ROWS, WIDTH, device=device), filled(100, 64, torch.uint8, device)
    with made(device, device_pages=2) as stash:
        stash.register(layers)
        stash.reset()
        step(layers, x, recipe)
        with monkeypatch.context() as patched:
            patched.setattr(manager, "stream_captures", lambda: True)
            stash.reset()
        second = copy.deepcopy(layers)
        handle = stash.stash("lost", [t], count(100, device))
        step(layers, 8 * x, recipe)
        torch.rand(3)
        layers.zero_grad(set_to_none=True)
        state = torch.get_rng_state()
        stash.rerun(lambda: drawn.append(torch.get_rng_state()))
        assert handle and torch.equal(drawn[0], state)
        assert_same_state(layers, second, "after a replay")


def test_recomputation_reads_the_scales_that_are_put_back(device):
    """A copy of the scales is made once and shared until they change."""
    layers, recipe = modules(device)[:1], R.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    second = copy.deepcopy(layers)
    xs = [randn(ROWS, WIDTH, device=device) * 4**k for k in range(3)]
    with made(device) as stash:
        stash.register(layers)
        for k, x in enumerate(xs):
            stash.reset()
            if k == 1:
                step(layers, x, recipe)
                layers[0].fp8_meta["scaling_fwd"].used()
                lost = stash.stash("a", [filled(9, 4, torch.uint8, device)], count(100, device))
                assert float(stash.gate()) == 1 and lost
                continue
            found = []
            for module in (layers, second):
                module.zero_grad(set_to_none=True)
                with te.autocast(recipe=recipe):
                    y = te.checkpoint(module[0], x.clone().requires_grad_(), use_reentrant=False)
                y.sum().backward()
                found.append([p.grad for p in module.parameters()])
            assert all(map(torch.equal, *found)), k


def test_a_rerun_puts_trackers_back(device):
    """Numbers drawn inside of a fork are drawn again: the states of trackers belong to the start of a step."""
    tracker = te.distributed.CudaRNGStatesTracker()
    tracker.add("a", 1234)

    def draw():
        with tracker.fork("a"):
            return torch.rand(3, device=device)

    with made(device) as stash:
        stash.reset()
        first = draw()
        assert torch.equal(stash.rerun(draw), first) and not torch.equal(draw(), first)


def test_a_rerun_puts_a_callers_own_tracker_back(device):
    """A tracker of a foreign class in a registered module."""

    class Own:
        def __init__(self):
            self.drawn = 0

        def get_states(self):
            return {"drawn": self.drawn}

        def set_states(self, states):
            self.drawn = states["drawn"]

    tracker = Own()
    attention = te.DotProductAttention(2, 4, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)

    def draw():
        tracker.drawn += 1
        return tracker.drawn

    with made(device) as stash:
        stash.register(attention)
        stash.reset()
        assert draw() == 1 and stash.rerun(draw) == 1 and draw() == 2


def test_only_what_is_registered(device):
    """Modules that are not registered keep the state of a bad step."""
    layers, other, recipe = modules(device), modules(device), R.DelayedScaling(amax_history_len=2)
    x = randn(ROWS, WIDTH, device=device)
    with made(device) as stash:
        stash.register(layers)
        stash.reset()
        step(other, x, recipe)
        step(layers, x, recipe)
        stash.stash("a", [filled(9, 4, torch.uint8, device)], count(100, device))
        assert float(stash.gate()) == 1
        assert all(bool((m.fp8_meta["scaling_fwd"].scale == 1).all()) for m in layers)
        assert not any(bool((m.fp8_meta["scaling_fwd"].scale == 1).all()) for m in other)
        assert LIVE
