# A recipe of another class than a module last ran under: a warning that names both, and new quantizers.
import copy
import warnings

import pytest
import torch
from families import FAMILIES, build, inputs_of, loss_of
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("fp8_left_off")
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
WITH_PRODUCTS = [name for name in FAMILIES if name not in ("LayerNorm", "RMSNorm")]


def step(module, x, recipe, training=True):
    """Output and gradients; no warning but those of a switch."""
    module.zero_grad()
    with te.autocast(recipe=recipe), torch.set_grad_enabled(training):
        out = module(x)
    if training:
        loss_of(out).backward()
    return [out, *(p.grad for p in module.parameters())]


def quantizers_in(module):
    return [q for part in module.modules() if getattr(part, "quantizers", None) for q in part.quantizers["scaling_fwd"]]


@pytest.mark.parametrize("now", RECIPES)
@pytest.mark.parametrize("before", RECIPES)
@pytest.mark.parametrize("name", WITH_PRODUCTS)
@pytest.mark.parametrize("training", [True, False])
def test_another_class_warns_and_makes_new_quantizers(name, before, now, training, device):
    if before == now:
        return
    module, x = build(name, device), inputs_of(name, device)[0]
    fresh = copy.deepcopy(module)
    step(module, x * 3, RECIPES[before](), training)
    old = {type(q) for q in quantizers_in(module)}
    with pytest.warns(UserWarning) as told:
        results = step(module, x, RECIPES[now](), training)
    parts = [type(part).__name__ for part in module.modules() if getattr(part, "quantizers", None)]
    words = (RECIPES[before].__name__, RECIPES[now].__name__)
    messages = [str(warning.message) for warning in told]
    assert len(messages) == len(parts)
    for part, message in zip(sorted(parts), sorted(messages), strict=True):
        assert message.startswith(f"{part}: ") and all(word in message for word in words)
    assert not old & {type(q) for q in quantizers_in(module)}
    for got, wanted in zip(results, step(fresh, x, RECIPES[now](), training), strict=True):
        if wanted is not None:
            assert_same_bits(got, wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_one_class_is_nothing_to_tell(name, device):
    module, x = build("LayerNormMLP", device), inputs_of("LayerNormMLP", device)[0]
    recipe = RECIPES[name]()
    other = copy.deepcopy(recipe)
    if name == "delayed":
        other.amax_history_len = 3
    else:
        other.fp8_gemm_fprop = type(other.fp8_gemm_fprop)(use_split_accumulator=True)
        other.fp8_gemm_dgrad = type(other.fp8_gemm_dgrad)(use_split_accumulator=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for used in (recipe, recipe, other, copy.deepcopy(other)):
            step(module, x, used)
            step(copy.deepcopy(module), x, used)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_is_no_switch(device, use_reentrant):
    """It runs under the recipe of its first run, as it should."""
    module = build("Linear", device)
    x = inputs_of("Linear", device)[0].requires_grad_()
    with te.autocast(recipe=Float8CurrentScaling()):
        out = te.checkpoint(module, x, use_reentrant=use_reentrant)
    with pytest.warns(UserWarning, match="was a Float8CurrentScaling"):
        step(module, x.detach(), Float8BlockScaling())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out.sum().backward()
