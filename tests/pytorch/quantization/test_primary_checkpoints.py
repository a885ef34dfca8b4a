# Weights held in FP8 alone under delayed scaling that a checkpoint or a pickle brings back.
import copy
import io

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def resumed(how, module, optimizer, made):
    if how == "saved":
        file = io.BytesIO()
        torch.save((module, optimizer), file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    if how == "deepcopy":
        return copy.deepcopy((module, optimizer))
    new, _ = made()
    new.load_state_dict(copy.deepcopy(module.state_dict()), assign=how == "assigned")
    its = te.optimizers.FusedAdam(new.parameters(), lr=0.01, master_weights=True)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new, its


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("how", ["deepcopy", "copied", "assigned", "saved"])
def test_a_resumed_run_has_the_same_bits(device, how, length):
    """The amax of rounded data is not noted beside that of the values they were made of."""
    recipe = DelayedScaling(amax_history_len=length)

    def made():
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=recipe):
            module = te.Linear(16, 16, params_dtype=torch.bfloat16, device=device)
        return module, te.optimizers.FusedAdam(module.parameters(), lr=0.01, master_weights=True)

    def run(stop=None):
        (module, optimizer), found = made(), []
        for i in range(6):
            if stop == i:
                module, optimizer = resumed(how, module, optimizer, made)
            torch.manual_seed(i)
            with te.autocast(recipe=recipe):
                y = module(randn(48, 16, device=device, dtype=torch.bfloat16))
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(module.weight.dequantize().clone())
        return found

    wanted = run()
    for stop in (1, 2, 3):
        for i, (got, want) in enumerate(zip(run(stop), wanted, strict=True)):
            assert_same_bits(got, want, f"resumed at {stop}, step {i}")


def test_an_assigned_weight_without_its_scales_gets_one_that_fits(device):
    """A fresh module's scale is 1, at which values of 1e-3 are subnormal numbers of E4M3."""
    recipe = DelayedScaling(amax_history_len=4)

    def made(scale):
        with te.quantized_model_init(recipe=recipe):
            module = te.Linear(16, 16, bias=False, params_dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            module.weight.copy_(randn(16, 16, device=device, scale=scale))
        return module

    source = made(1e-3)
    with te.quantized_model_init(recipe=recipe):
        module = te.Linear(16, 16, bias=False, params_dtype=torch.bfloat16, device="meta")
    module.load_state_dict({"weight": source.weight.detach().clone()}, strict=False, assign=True)
    with te.autocast(recipe=recipe):
        module(randn(16, 16, device=device, dtype=torch.bfloat16)).float().square().mean().backward()
    values = source.weight.dequantize() * 0.9
    with torch.no_grad():
        module.weight.copy_(values)
    assert (module.weight.dequantize() - values).abs().max() <= values.abs().max() / 16
