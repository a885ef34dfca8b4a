# Captured callables that draw random numbers: generators and trackers advance as in eager, also with checkpoints.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import HIDDEN, TOKENS, assert_same_step, build, capture, layer, mlp, plain, step, tokens, twins


def test_random_numbers_go_on_as_in_eager(device):
    """Dropout inside and outside of the captured part, and the states after it."""
    module, eager = twins(plain, device)
    capture(module, device)
    drawn = []
    for m in (module, eager):
        torch.manual_seed(5)
        x = torch.ones(*TOKENS, HIDDEN, device=device, requires_grad=True)
        parts = [torch.nn.functional.dropout(m(x), 0.5) for _ in range(3)]
        drawn.append([*parts, torch.rand(4, device=device)])
    for got, want in zip(*drawn):
        assert_same_bits(got, want)


def test_a_trackers_states_go_on_as_in_eager(device):
    if torch.cuda.is_available() != (device == "cuda"):
        pytest.skip("a tracker follows the machine's generator")
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 77)

    class Forked(torch.nn.Module):
        def forward(self, x):
            with tracker.fork():
                x = torch.nn.functional.dropout(x, 0.4)
            return torch.nn.functional.dropout(x, 0.2)

    module, eager = Forked(), Forked()
    before = tracker.get_states()
    capture(module, device)
    assert_same_bits(tracker.get_states()["model-parallel-rng"], before["model-parallel-rng"])
    results = []
    for m in (module, eager):
        tracker.set_states(before)
        results.append([step(m, torch.ones(*TOKENS, HIDDEN, device=device), seed) for seed in (1, 2)])
    for got, want in zip(*results):
        assert_same_step(got, want)


class Checkpointed(torch.nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return te.checkpoint(self.inner, x, **self.options)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", [mlp, layer], ids=lambda f: f.__name__)
def test_checkpoint_inside(device, family, reentrant):
    module = Checkpointed(build(family, device, **({"attention_dropout": 0.0} if family is layer else {})))
    module.options = {"use_reentrant": reentrant}
    eager = copy.deepcopy(module)
    capture(module, device)
    for seed in range(2):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))


def test_checkpoint_that_draws_numbers(device):
    module = Checkpointed(build(plain, device))
    eager = copy.deepcopy(module)
    if device == "cuda":
        with refused(NotImplementedError, "checkpoint", "random numbers", "capture", "dropout"):
            capture(module, device)
    else:
        capture(module, device)
    for seed in range(2):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))


@pytest.mark.gpu
def test_checkpoint_with_a_tracker_that_forks():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 77)

    def forked(x):
        with tracker.fork():
            return torch.nn.functional.dropout(x, 0.4)

    with refused(NotImplementedError, "checkpoint", "random numbers"):
        te.make_graphed_callables(lambda x: te.checkpoint(forked, x), (tokens("cuda", grad=True),))
