# The first call of a module under a tracer's mode or a transform of torch.func leaves nothing of theirs in it: a real
# step after it equals a fresh module's.
import copy

import pytest
import torch
from support import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R

FAMILIES = {
    "Linear": lambda device: te.Linear(32, 48, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(32, 48, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 64, device=device),
    "GroupedLinear": lambda device: te.GroupedLinear(3, 32, 48, device=device),
}
RECIPES = {"delayed": R.DelayedScaling, "current": R.Float8CurrentScaling, "block": R.Float8BlockScaling}
ROWS = 32


def call(module, x, **options):
    return module(x, [16, 0, 16], **options) if isinstance(module, te.GroupedLinear) else module(x, **options)


def under_fake_tensors(run, device):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return run(torch.randn(ROWS, 32, device=device))


def under_fake_tensors_that_do_not_mix(run, device):
    with FakeTensorMode():
        return run(torch.randn(ROWS, 32, device=device))


def under_grad(run, device):
    return torch.func.grad(lambda x: run(x).sum())(torch.randn(ROWS, 32, device=device))


def under_vmap(run, device):
    return torch.func.vmap(run)(torch.randn(2, ROWS, 32, device=device))


def in_inference_mode(run, device):
    with torch.inference_mode():
        return run(torch.randn(ROWS, 32, device=device))


FIRST_CALLS = (under_fake_tensors, under_fake_tensors_that_do_not_mix, under_grad, under_vmap, in_inference_mode)


def steps(module, x, recipe, **options):
    """Two of them: the second one by what the first one left."""
    results = []
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=True, recipe=recipe):
            y = call(module, x, **options)
        y.sum().backward()
        results += [y, x.grad, *(p.grad for p in module.parameters())]
    return results


@pytest.mark.parametrize("first", FIRST_CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"is_first_microbatch": True}], ids=["", "kept_weights"])
def test_a_fresh_module_survives(family, recipe, first, options, device):
    module = FAMILIES[family](device)
    twin = copy.deepcopy(module)
    made = RECIPES[recipe]()
    try:
        with te.autocast(enabled=True, recipe=made):
            first(lambda x: call(module, x, **options), device)
    except Exception:  # most are refused, by us or by torch
        pass
    x = torch.randn(ROWS, 32, device=device)
    for got, want in zip(steps(module, x, made, **options), steps(twin, x, made, **options), strict=True):
        assert_same_bits(got, want)
    for direction in ("scaling_fwd", "scaling_bwd") if recipe == "delayed" else ():
        assert_same_bits(module.fp8_meta[direction].scale, twin.fp8_meta[direction].scale)
        assert_same_bits(module.fp8_meta[direction].amax_history, twin.fp8_meta[direction].amax_history)


@pytest.mark.parametrize("first", FIRST_CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_held_in_fp8_survive(recipe, first, device):
    made = RECIPES[recipe]()
    with te.quantized_model_init(enabled=True, recipe=made):
        module = te.Linear(32, 48, device=device)
    twin = copy.deepcopy(module)
    try:
        with te.autocast(enabled=True, recipe=made):
            first(module, device)
    except Exception:
        pass
    x = torch.randn(ROWS, 32, device=device)
    for got, want in zip(steps(module, x, made), steps(twin, x, made), strict=True):
        assert_same_bits(got, want)
