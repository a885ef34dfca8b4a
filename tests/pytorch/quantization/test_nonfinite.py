# FP8 results of values that are not finite, pinned: the conversions saturate, so Inf becomes the largest finite value
# at the scale of its tensor or block, and NaN stays NaN (documented in guide/fp8.md).
import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("fp8_left_off")
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
ROUNDING = 2**-23  # of a product of two scales, which the GPU rounds once more
each = pytest.mark.parametrize("name", RECIPES)


def identity(device):
    module = te.Linear(128, 128, bias=False, device=device)
    with torch.no_grad():
        module.weight.copy_(torch.eye(128))
    return module


@each
def test_an_infinite_input_becomes_the_largest_finite_value(device, name):
    """The value of E4M3 at scale 1: delayed scaling has this scale in its first step, and others take it where the amax
    is infinite. The other values of the tensor or the block are quantized at that scale."""
    module, x = identity(device), torch.zeros(128, 128, device=device)
    x[3, 5], x[4, 6], x[9, 9] = torch.inf, -torch.inf, 1.0
    with te.autocast(recipe=RECIPES[name]()):
        y = module(x)
    assert [y[3, 5].item(), y[4, 6].item(), y[9, 9].item()] == pytest.approx([448.0, -448.0, 1.0], rel=ROUNDING)
    assert torch.isfinite(y).all()


@each
def test_an_infinite_gradient_becomes_finite_too(device, name):
    """An overflow check after the layer finds nothing: 57344 in E5M2 (block scaling has E4M3 there)."""
    module, x = identity(device), randn(128, 128, device=device).requires_grad_()
    gradient = torch.zeros(128, 128, device=device)
    gradient[3, 5] = torch.inf
    with te.autocast(recipe=RECIPES[name]()):
        y = module(x)
    y.backward(gradient)
    largest = 448.0 if name == "block" else 57344.0
    assert x.grad[3, 5].item() == pytest.approx(largest, rel=ROUNDING) and torch.isfinite(x.grad).all()
    assert torch.isfinite(module.weight.grad).all()


@each
def test_nan_stays(device, name):
    module, x = identity(device), torch.ones(128, 128, device=device)
    x[3, 5] = torch.nan
    with te.autocast(recipe=RECIPES[name]()):
        y = module(x.requires_grad_())
    y.sum().backward()
    assert y[3].isnan().all() and torch.isfinite(y[torch.arange(128, device=device) != 3]).all()
    assert module.weight.grad.isnan().any()


def test_delayed_scaling_makes_no_scale_of_it(device):
    """The scale stays as it was for as long as the history holds an infinite amax."""
    module, recipe, scales = identity(device), DelayedScaling(amax_history_len=2), []
    for amax in (4.0, torch.inf, 2.0, 2.0, 2.0):
        x = torch.full((128, 128), 1.0, device=device)
        x[0, 0] = amax
        with te.autocast(recipe=recipe):
            module(x).sum().backward()
        scales.append(module.fp8_meta["scaling_fwd"].scale[0].item())
    assert all(scale > 0 and scale != torch.inf for scale in scales)
    assert scales[0] == scales[1] == 448 / 4 and scales[-1] == 448 / 2
