# te.checkpoint around a run: how code finds out which run it is in, exceptions and misuse, torch.compile.
# test_recompute.py checks that it changes no bit.
import contextlib
import copy

import pytest
import torch
from families import FFN, HEAD, HIDDEN, build
from plain_modules import angles, randomize
from support import assert_same_bits, in_threads, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)

from .recompute_cases import Dropping, both_ways, same_bits, step, tokens

# ---- phases ----


def phase():
    return is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()


@both_ways
def test_phases(device, use_reentrant):
    seen, linear = [], te.Linear(HIDDEN, HIDDEN, device=device)

    def watched(x):
        seen.append(phase())
        return linear(x)

    def outer(x):
        y = te.checkpoint(watched, x, use_reentrant=use_reentrant)
        seen.append(("outer", *phase()))
        return linear(y)

    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        out = te.checkpoint(watched, tokens(device), use_reentrant=use_reentrant)
        assert phase() == (False, False)
    out.sum().backward()
    assert seen == [(True, False), (True, True)] and phase() == (False, False)
    seen.clear()
    with te.autocast(recipe=recipe):
        out = te.checkpoint(outer, tokens(device), use_reentrant=use_reentrant)
    out.sum().backward()
    first, second = [(True, False), ("outer", True, False)], [(True, True), ("outer", True, True)]
    assert seen == [*first, *second, (True, True)] and phase() == (False, False)


@both_ways
def test_a_recomputation_is_reported_inside_an_enabled_autocast_alone(device, use_reentrant):
    seen, linear = [], te.Linear(HIDDEN, HIDDEN, device=device)

    def watched(x):
        seen.append(phase()[0])
        with te.autocast(recipe=Float8CurrentScaling()):
            seen.append(phase()[0])
            with te.autocast(enabled=False):
                seen.append(phase()[0])
            return linear(x)

    te.checkpoint(watched, tokens(device), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True, False] * 2
    with activation_recompute_forward(activation_recompute=True), te.autocast(enabled=False, calibrating=True):
        assert phase() == (False, False)


def test_phases_are_a_threads_own():
    with te.autocast(recipe=Float8CurrentScaling()):
        with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
            assert phase() == (True, True)
            assert in_threads(2, lambda _: phase()) == [(False, False)] * 2
            with activation_recompute_forward():
                assert phase() == (False, False)
            assert phase() == (True, True)
        with pytest.raises(KeyError), activation_recompute_forward(True, False):
            raise KeyError
        assert phase() == (False, False)


# ---- exceptions and misuse ----


@both_ways
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_inside(device, use_reentrant, when):
    """It comes out as it is; random states, phases and the module are as before the step that failed."""
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 6)
    module, x, calls = Dropping(device, tracker), tokens(device), []

    def failing(t):
        out = module(t)
        calls.append(0)
        if len(calls) == (1 if when == "forward" else 2):
            raise KeyError("mine")
        return out

    start = tracker.get_states()
    kept = step(lambda m, t: m(t), module, x, tracker=tracker)
    module.zero_grad()
    tracker.set_states(start)
    torch.manual_seed(11)
    if when == "forward":
        with pytest.raises(KeyError, match="mine"):
            te.checkpoint(failing, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
    else:
        out = te.checkpoint(failing, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
        states, drawn = tracker.get_states(), torch.get_rng_state()
        if use_reentrant:
            with pytest.raises(KeyError, match="mine"):
                out.sum().backward()
        else:
            # Without reentrance the second run stops where the last tensor that the backward needs is there.
            with torch.utils.checkpoint.set_checkpoint_early_stop(False), pytest.raises(KeyError, match="mine"):
                te.checkpoint(failing_from(calls, failing), x, use_reentrant=False).sum().backward()
            tracker.set_states(states)
            torch.set_rng_state(drawn)
        assert_same_bits(torch.get_rng_state(), drawn)
        same_bits(tracker.get_states(), states)
    assert phase() == (False, False)
    assert all(p.grad is None for p in module.parameters())
    tracker.set_states(start)
    same_bits(step(lambda m, t: m(t), module, x, tracker=tracker), kept)


def failing_from(calls, failing):
    calls.clear()
    return failing


def test_what_excludes_itself_is_refused_by_name(device):
    linear, x = te.Linear(HIDDEN, HIDDEN, device=device), tokens(device)
    for name, value in (("context_fn", lambda: None), ("determinism_check", "none"), ("debug", True)):
        with refused(ValueError, "checkpoint", f"'{name}'", "use_reentrant=True"):
            te.checkpoint(linear, x, **{name: value})
    with refused(ValueError, "checkpoint", "'use_reentrant'", "None"):
        te.checkpoint(linear, x, use_reentrant=None)
    for way in (True, False):
        with refused(ValueError, "checkpoint", "'distribute_saved_activations'", "'tp_group' None"):
            te.checkpoint(linear, x, distribute_saved_activations=True, use_reentrant=way)
    assert phase() == (False, False)


def test_torchs_options_reach_torch(device):
    """context_fn's two contexts are around the two runs; determinism_check sees a second run that differs."""
    linear, x, log = te.Linear(HIDDEN, HIDDEN, device=device), tokens(device), []

    @contextlib.contextmanager
    def note(word):
        log.append(word)
        yield

    def pair():
        return note("first"), note("second")

    te.checkpoint(linear, x, use_reentrant=False, context_fn=pair).sum().backward()
    assert log == ["first", "second"]
    calls = []

    def differs(t):
        calls.append(0)
        return linear(t if len(calls) == 1 else t[1:])

    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        te.checkpoint(differs, x, use_reentrant=False, determinism_check="default").sum().backward()
    with pytest.raises(ValueError, match="determinism_check"):
        te.checkpoint(linear, x, use_reentrant=False, determinism_check="sometimes")


# ---- torch.compile ----


@both_ways
@pytest.mark.parametrize("name", ["LayerNormMLP", "TransformerLayer"])
def test_inside_a_compiled_function(device, name, use_reentrant):
    module, x = build(name, device), tokens(device)
    freqs = angles(x.shape[0], HEAD).to(device)
    kwargs = {"rotary_pos_emb": freqs} if name == "TransformerLayer" else {}

    def checkpointed(m, t):
        return te.checkpoint(m, t, use_reentrant=use_reentrant, **kwargs)

    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    kept = step(lambda m, t: torch.compile(m, fullgraph=True, backend="aot_eager")(t, **kwargs), module, x)
    same_bits(step(compiled, module, x), kept)


def test_a_tracker_is_refused_under_compile():
    linear, tracker = te.Linear(HIDDEN, HIDDEN, device="cpu"), te.CudaRNGStatesTracker()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(t):
        return te.checkpoint(linear, t, get_rng_state_tracker=lambda: tracker)

    with pytest.raises(Exception, match="get_rng_state_tracker"):
        compiled(tokens("cpu"))


def test_a_module_that_holds_checkpointed_blocks_copies():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = randomize(te.LayerNormMLP(HIDDEN, FFN, device="cpu"))

        def forward(self, x):
            return te.checkpoint(self.block, x)

    model, x = Model(), tokens("cpu")
    kept = step(lambda m, t: m(t), model, x)
    same_bits(step(lambda m, t: m(t), copy.deepcopy(model), x), kept)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exception_leaves_no_hooks(reentrant):
    def fails(x):
        x = x * x
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        te.checkpoint(fails, tokens("cpu"), use_reentrant=reentrant)
    assert caught.traceback[-1].name == "fails"
    x = tokens("cpu")
    y = x * x  # while the traceback lives: what is saved here is x
    assert y.grad_fn._saved_self.data_ptr() == x.data_ptr()
