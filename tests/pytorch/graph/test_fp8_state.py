# The state that a capture under quantization leaves, and how later calls change it: scales, faults, saved states,
# weights that are quantized again.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import restore_fp8_tensors, save_fp8_tensors
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import HIDDEN, assert_same_step, build, linear, mlp, split_linear, tokens
from .fp8_cases import RECIPES, around, assert_same_states, capture, fp8_step, states, twins
from .fp8_families import delayed, every_recipe, layer
from .program_states import unchecked


@pytest.fixture(autouse=True)
def no_state_of_others():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


# ---- the state after a capture ----


@delayed
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_capture_leaves_scales_as_they_were(device, name, used):
    module, eager = twins(layer, device)
    for seed in range(3 if used else 0):
        x = tokens(device, torch.bfloat16)
        assert_same_step(fp8_step(module, x, seed, name), fp8_step(eager, x, seed, name))
    before = states(module)
    capture(module, device, name)
    if used:
        assert_same_states(states(module), before)
    module.reset()
    for seed in range(3):
        x = tokens(device, torch.bfloat16)
        assert_same_step(fp8_step(module, x, seed, name), fp8_step(eager, x, seed, name))
        assert_same_states(states(module), states(eager))


@every_recipe
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("when", ["forward_hooks", "backward_hooks"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_fault_leaves_quantization_as_it_was(device, name, used, when, count):
    module, eager = twins(mlp, device)
    for seed in range(3 if used else 0):
        x = tokens(device, torch.bfloat16)
        for m in (module, eager):
            fp8_step(m, x, seed, name, is_first_microbatch=True)
    before, extra = states(module), module.get_extra_state().clone()
    calls = []

    def hook(_):
        calls.append(1)
        if len(calls) == count:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(module, device, name, cache_quantized_params=True, capture_time_hooks=[{when: {0: hook}}])
    assert_same_states(states(module), before)
    assert torch.equal(module.get_extra_state(), extra)
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None
    for seed in range(2):
        x = tokens(device, torch.bfloat16)
        options = {"is_first_microbatch": False} if used else {}
        assert_same_step(fp8_step(module, x, seed, name, **options), fp8_step(eager, x, seed, name, **options))
        assert_same_states(states(module), states(eager))


def test_saved_states(device):
    module, _ = twins(layer, device)
    assert save_fp8_tensors([module], RECIPES["current"]) is None
    restore_fp8_tensors([module], None)
    empty = save_fp8_tensors([module], RECIPES["delayed"])
    fp8_step(module, tokens(device, torch.bfloat16), 1, "delayed")
    before, saved = states(module), save_fp8_tensors([module], RECIPES["delayed"])
    fp8_step(module, tokens(device, torch.bfloat16), 2, "delayed")
    restore_fp8_tensors([module], saved)
    assert_same_states(states(module), before)
    restore_fp8_tensors([module], empty)
    assert all(s.eq(1 if key.endswith("scale") else 0).all() for key, s in states(module).items())
    with refused(ValueError, "restore_fp8_tensors", "'fp8_tensors'", "'modules'"):
        restore_fp8_tensors([module, module], saved)
    restore_fp8_tensors(module, save_fp8_tensors(module, None))  # one module, and any recipe


def test_states_that_were_saved_for_others(device):
    modules = [build(linear, device), build(mlp, device)]
    for module in modules:
        fp8_step(module, tokens(device, torch.float32), 1, "delayed")
    saved, before = save_fp8_tensors(modules, None), [states(m) for m in modules]
    for module in modules:
        fp8_step(module, tokens(device, torch.float32), 2, "delayed")
    after = [states(m) for m in modules]
    for wrong in (saved[::-1], saved[:1], [saved[0], 5], [saved[0], saved[1][:1]], 5):
        with refused(ValueError, "restore_fp8_tensors", "'fp8_tensors'"):
            restore_fp8_tensors(modules, wrong)
        for module, held in zip(modules, after):
            assert_same_states(states(module), held)
    restore_fp8_tensors(modules, saved)
    for module, held in zip(modules, before):
        assert_same_states(states(module), held)
    for wrong in (5, None, [5]):
        with refused(ValueError, "save_fp8_tensors", "'modules'"):
            save_fp8_tensors(wrong, None)
        with refused(ValueError, "restore_fp8_tensors", "'modules'"):
            restore_fp8_tensors(wrong, saved)
    with refused(ValueError, "save_fp8_tensors", "'recipe'", "5"):
        save_fp8_tensors(modules, 5)


@delayed
def test_scales_that_are_others_now_are_refused(device, name):
    module, _ = twins(linear, device)
    capture(module, device, name)
    module.adjust_amax_history_length(9)
    with around(name), refused(RuntimeError, "Linear", "history length", "capture again"):
        module(tokens(device, torch.bfloat16, grad=True))


@every_recipe
def test_without_gradients(device, name):
    module, eager = twins(mlp, device)
    for m in (module, eager):
        m.eval()
    with torch.no_grad():
        capture(module, device, name)
    x = tokens(device, torch.bfloat16)
    with torch.no_grad(), around(name):
        assert_same_bits(module(x), eager(x))
    assert_same_states(states(module), states(eager))


def test_quantized_parameters(device):
    with te.quantized_model_init(enabled=True, recipe=RECIPES["current"]):
        module = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device=device)
    eager = copy.deepcopy(module)
    capture(module, device, "current")
    for seed in range(2):
        x = tokens(device, torch.bfloat16)
        got, want = fp8_step(module, x, seed, "current"), fp8_step(eager, x, seed, "current")
        for key in want:
            assert torch.equal(got[key], want[key]) if want[key] is not None else got[key] is None, key


@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.parametrize("family", [linear, split_linear], ids=lambda f: f.__name__)
@pytest.mark.parametrize("written", [False, True], ids=["same", "written"])
def test_weights_that_are_quantized_again_between_a_call_and_its_backward(device, family, name, written):
    """All microbatches share the quantized weights. The backward of eager reads those of its call, so its bits
    differ."""
    module, eager = twins(family, device)
    fp8 = {"enabled": True, "recipe": RECIPES[name], "cache_quantized_params": True}

    def sample():
        return tokens(device, torch.bfloat16, grad=True)

    passes = te.make_graphed_callables((module,), tuple((sample(),) for _ in range(2)), _order=[1, 1, -1, -1], **fp8)
    unchecked(passes, module)

    def grads(calls, weights):
        x = [torch.full_like(sample(), 0.5 + i).requires_grad_() for i in range(2)]
        one = calls[0](x[0], is_first_microbatch=True)
        if written:
            with torch.no_grad():
                for p in weights.parameters():
                    p.mul_(3.0)
        two = calls[1](x[1], is_first_microbatch=True)
        one.float().sum().backward()
        two.float().sum().backward()
        return [x[0].grad, x[1].grad]

    if written:
        with pytest.raises(RuntimeError, match="quantized again by another call"):
            grads(passes, module)
        return
    with te.autocast(enabled=True, recipe=RECIPES[name]):
        want = grads((eager, eager), eager)
    for got, wanted in zip(grads(passes, module), want):
        assert_same_bits(got, wanted)
