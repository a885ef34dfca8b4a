# Modules under autocast that keep a quantized weight between microbatches: no bit changes, and it is quantized when it
# should be.
import copy

import pytest
import torch
from families import build, inputs_of, loss_of
from fp8_steps import RECIPES, assert_same_tensors, grads_of
from plain_modules import as_tuple
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

pytestmark = pytest.mark.usefixtures("fp8_left_off")


# ---- weights between microbatches ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "split Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_a_cached_weight_changes_no_bit(device, name, recipe):
    module = build(name, device)
    batches = [inputs_of(name, device) for _ in range(3)]
    results = {}
    for cached in (False, True):
        other = copy.deepcopy(module)
        outputs = []
        for i, inputs in enumerate(batches):
            with te.autocast(recipe=RECIPES[recipe](amax_history_len=64) if recipe == "delayed" else RECIPES[recipe]()):
                out = as_tuple(other(*inputs, is_first_microbatch=(i == 0) if cached else None))[0]
                loss_of(out).backward()
            outputs.append(out)
            if recipe == "delayed":  # the cached weight keeps the scale that it was quantized with
                break
        results[cached] = outputs, grads_of(other)
    for a, b in zip(*(results[c][0] for c in (True, False)), strict=True):
        assert_same_bits(a, b)
    assert_same_tensors(results[True][1], results[False][1])


def test_a_weight_is_quantized_when_it_should_be_and_only_then(device):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    context = te.autocast(recipe=Float8CurrentScaling())

    def call(first):
        with context:
            return module(x, is_first_microbatch=first).detach()

    first = call(True)
    with torch.no_grad():
        module.weight.mul_(-2)
    assert_same_bits(call(False), first)
    assert_same_bits(call(None), call(None))
    assert not torch.equal(call(None), first)
    assert_same_bits(call(False), first)  # None has kept nothing
    changed = call(True)
    assert not torch.equal(changed, first)
    assert_same_bits(call(False), changed)
    assert_same_bits(call(None), changed)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.mul_(3)
    with context:
        assert not torch.equal(other(x, is_first_microbatch=False), changed)  # its own: nothing was kept yet


def test_the_flag_on_the_device_decides_in_a_capture(device):
    """It has no effect elsewhere: in eager is_first_microbatch decides whether the weight is quantized."""
    module, x = te.Linear(16, 16, bias=False, device=device), randn(8, 16, device=device)
    manager = FP8GlobalStateManager

    def call(graph=True, **microbatch):
        with te.autocast(recipe=Float8BlockScaling(), _graph=graph):
            return module(x, **microbatch).detach()

    fresh = call()
    manager.set_skip_fp8_weight_update_tensor(True)
    assert_same_bits(call(), fresh)  # nothing was there to be kept
    address = module.runtime.quantization.weights.kept[""][1].rowwise.data_ptr()
    with torch.no_grad():
        module.weight.neg_()
    assert_same_bits(call(), fresh)
    assert_same_bits(call(graph=False), -fresh)
    assert_same_bits(call(), fresh)
    eager = copy.deepcopy(module)
    with te.autocast(recipe=Float8BlockScaling()):
        assert_same_bits(eager(x, is_first_microbatch=True), call(graph=False))
    manager.set_skip_fp8_weight_update_tensor(False)
    assert not torch.equal(call(), fresh)
    assert module.runtime.quantization.weights.kept[""][1].rowwise.data_ptr() == address
    changed = call()
    manager.set_skip_fp8_weight_update_tensor(True)
    with torch.no_grad():
        module.weight.mul_(2)
    assert_same_bits(call(graph=False, is_first_microbatch=False), changed)
    doubled = call(graph=False, is_first_microbatch=True)
    assert not torch.equal(doubled, changed)
    assert_same_bits(call(graph=False, is_first_microbatch=None), doubled)
    manager.set_skip_fp8_weight_update_tensor(None)
    assert_same_bits(call(), doubled)
