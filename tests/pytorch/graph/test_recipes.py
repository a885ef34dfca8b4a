# Captures under another recipe than the modules ran under before: eager's switch of recipe where they succeed, nothing
# where they fail.
import copy
import warnings

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import assert_same_step, build, linear, mlp, step, tokens
from .fault_cases import STAGES, WARMUPS, Fault, Faulty, faulty_backward_dw
from .fp8_cases import assert_same_states, states

BEFORE = DelayedScaling(amax_history_len=8)
# Differences in the recipe of the capture.
SWITCHES = {
    "shorter history": DelayedScaling(amax_history_len=2),
    "longer history": DelayedScaling(amax_history_len=16),
    "format": DelayedScaling(amax_history_len=8, fp8_format=Format.E4M3),
    "margin": DelayedScaling(amax_history_len=8, margin=3),
    "algorithm": DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent"),
    "all": DelayedScaling(3, Format.E4M3, 3, "most_recent"),
}
OTHERS = SWITCHES | {"current": Float8CurrentScaling()}


@pytest.fixture(autouse=True)
def no_state_of_others():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def run(module, x, seed, recipe, **kwargs):
    def call(x, **kwargs):
        with te.autocast(enabled=True, recipe=recipe):
            return module(x, **kwargs)

    return step(module, x, seed, call=call, **kwargs)


def assert_same_steps(device, module, eager, recipe, count=3):
    for seed in range(count):
        x = tokens(device, torch.bfloat16)
        assert_same_step(run(module, x, seed, recipe), run(eager, x, seed, recipe), f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")


def used_twins(family, device, recipe, steps=3, **options):
    module = build(family, device, torch.bfloat16, **options)
    eager = copy.deepcopy(module)
    assert_same_steps(device, module, eager, recipe, steps)
    return module, eager


def capture(module, device, recipe, **options):
    sample = (tokens(device, torch.bfloat16, grad=True),)
    return te.make_graphed_callables(module, sample, enabled=True, recipe=recipe, **options)


@pytest.mark.parametrize("backwards", [False, True], ids=["to", "from"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_capture_under_another_recipe_is_eagers_switch(device, switch, backwards):
    recipes = (BEFORE, SWITCHES[switch])[:: -1 if backwards else 1]
    module, eager = used_twins(mlp, device, recipes[0])
    capture(module, device, recipes[1])
    assert_same_steps(device, module, eager, recipes[1])
    module.reset()
    assert_same_steps(device, module, eager, recipes[0])


def test_histories_of_a_length_of_their_own(device):
    module, eager = used_twins(linear, device, BEFORE)
    for m in (module, eager):
        m.adjust_amax_history_length(5)
    capture(module, device, BEFORE)
    assert_same_steps(device, module, eager, BEFORE)


def test_a_checkpoint_of_another_recipe_after_a_capture(device):
    """Its state is converted to the captured recipe, in the memory that the graph reads."""
    other, _ = used_twins(linear, device, SWITCHES["all"])
    module, eager = used_twins(linear, device, BEFORE)
    capture(module, device, BEFORE)
    for m in (module, eager):
        m.load_state_dict(other.state_dict())
    assert_same_steps(device, module, eager, BEFORE)


@pytest.mark.parametrize("switch", [None, "all"], ids=["one recipe", "another"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_capture_leaves_the_recipe(device, stage, switch, monkeypatch):
    where, count, options = STAGES[stage]
    inner, _ = used_twins(mlp, device, BEFORE, delay_wgrad_compute=True)
    inner.drop_backward_dw()
    inner.zero_grad()
    module = Faulty(inner, where, count)
    eager = copy.deepcopy(module)
    eager.where = None
    before = {key: (state.rule, state.scale, state.amax_history) for key, state in scalings(inner)}
    if where == "wgrad":
        faulty_backward_dw(monkeypatch, count)
    with pytest.raises(Fault):
        capture(module, device, OTHERS[switch] if switch else BEFORE, num_warmup_iters=WARMUPS, **options())
    monkeypatch.undo()
    module.where = None
    after = {key: (state.rule, state.scale, state.amax_history) for key, state in scalings(inner)}
    assert before.keys() == after.keys()
    for key, held in before.items():  # another graph may read this memory
        assert all(a is b for a, b in zip(after[key], held)), key
    for m in (module, eager):
        m.inner.drop_backward_dw()
    assert_same_steps(device, module, eager, BEFORE)


@pytest.mark.parametrize("switch", OTHERS)
def test_each_switch_that_fails(device, switch):
    module, eager = used_twins(linear, device, BEFORE)

    def fail(_):
        raise Fault

    with pytest.raises(Fault):
        capture(module, device, OTHERS[switch], capture_time_hooks=[{"backward_hooks": {0: fail}}])
    assert_same_steps(device, module, eager, BEFORE)


def test_quantized_parameters_keep_their_quantizers(device):
    with te.quantized_model_init(enabled=True, recipe=BEFORE):
        module = linear(params_dtype=torch.bfloat16, device=device)
    run(module, tokens(device, torch.bfloat16), 0, BEFORE)
    before = module.weight._quantizer

    def fail(_):
        raise Fault

    with pytest.raises(Fault):
        capture(module, device, SWITCHES["all"], capture_time_hooks=[{"forward_hooks": {0: fail}}])
    assert module.weight._quantizer is before


def scalings(module):
    return [(key, module.fp8_meta[key]) for key in ("scaling_fwd", "scaling_bwd")]


# ---- the autocast around a replay ----

FP8 = {"delayed": BEFORE, "current": Float8CurrentScaling()}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", FP8)
def test_another_recipe_around_a_replay_is_refused(device, name, grad):
    module, eager = used_twins(linear, device, FP8[name])
    capture(module, device, FP8[name])
    others = [recipe for recipe in (*OTHERS.values(), None) if recipe != FP8[name]]
    for other in others:
        before = states(module)
        with te.autocast(enabled=True, recipe=other), torch.set_grad_enabled(grad):
            with refused(RuntimeError, "Linear", "another recipe", repr(FP8[name]), "capture again"):
                module(tokens(device, torch.bfloat16, grad=True))
        assert_same_states(states(module), before)
    assert_same_steps(device, module, eager, FP8[name])
    assert_same_steps(device, module, eager, copy.copy(FP8[name]))  # an equal recipe is the same


def test_a_recipe_that_was_changed_in_place_is_another(device):
    own = copy.copy(BEFORE)
    module, _ = used_twins(linear, device, own)
    capture(module, device, own)
    own.margin = 2
    with te.autocast(enabled=True, recipe=own), refused(RuntimeError, "Linear", "margin=2", "capture again"):
        module(tokens(device, torch.bfloat16, grad=True))


def test_the_default_recipe(device):
    module, eager = used_twins(linear, device, None)
    capture(module, device, None)
    assert_same_steps(device, module, eager, None)
    assert_same_steps(device, module, eager, DelayedScaling())


def test_high_precision_that_was_captured_ignores_the_autocast(device):
    module = build(linear, device, torch.bfloat16)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, torch.bfloat16, grad=True),))
    x = tokens(device, torch.bfloat16)
    for recipe in FP8.values():
        assert_same_step(run(module, x, 1, recipe), step(eager, x, 1))
        module.zero_grad(), eager.zero_grad()


def test_the_captured_recipe_runs_without_an_autocast(device):
    """No autocast, or one with enabled=False, does not switch the graph."""
    module = build(linear, device, torch.bfloat16)
    eager = copy.deepcopy(module)
    capture(module, device, FP8["current"])
    x = tokens(device, torch.bfloat16)
    want = run(eager, x, 1, FP8["current"])
    assert_same_step(step(module, x, 1), want)
    module.zero_grad()
    with te.autocast(enabled=False):
        assert_same_step(step(module, x, 1), want)


def test_a_recipe_inside_of_the_callable(device):
    """The callable contains an autocast: the one around a replay has no effect."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(linear, device, torch.bfloat16)

        def forward(self, x):
            with te.autocast(enabled=True, recipe=FP8["current"]):
                return self.inner(x)

    module = Own()
    eager = copy.deepcopy(module)
    capture(module, device, BEFORE)
    x = tokens(device, torch.bfloat16)
    for recipe in OTHERS.values():
        assert_same_step(run(module, x, 1, recipe), run(eager, x, 1, recipe))
        module.zero_grad(), eager.zero_grad()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_call_in_an_autocast_of_a_capture_without(device, enabled):
    """It runs as captured, with one warning; no warning if it has no GEMMs, or if the autocast is disabled."""
    module = build(mlp, device, torch.bfloat16)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, torch.bfloat16, grad=True),))
    x = tokens(device, torch.bfloat16, grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with te.autocast(enabled=enabled, recipe=Float8CurrentScaling()):
                got = module(x)
    assert len(caught) == enabled
    if enabled:
        assert "called in te.autocast, but captured without" in str(caught[0].message)
        assert "LayerNormMLP" in str(caught[0].message) and caught[0].category is UserWarning
    assert_same_bits(got, eager(x))
    norm = te.RMSNorm(x.shape[-1], device=device, params_dtype=torch.bfloat16)
    te.make_graphed_callables(norm, (tokens(device, torch.bfloat16, grad=True),))
    with warnings.catch_warnings(), te.autocast(enabled=enabled, recipe=Float8CurrentScaling()):
        warnings.simplefilter("error")
        norm(x)
