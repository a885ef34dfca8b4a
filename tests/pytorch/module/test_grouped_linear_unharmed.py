# te.GroupedLinear after a call that was refused: the next step has the bits of a module without that call, in gradients
# and scales, by a list of sizes and by sizes on the device.
import copy
from contextlib import contextmanager

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R

from .grouped_cases import RECIPES, SPLITS, K, N, build, give_main_grads, step

pytestmark = pytest.mark.usefixtures("fp8_left_off")

ROWS = sum(SPLITS)
either = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def splits_of(on_device, device):
    return torch.tensor(SPLITS, device=device) if on_device else SPLITS


def draw(device):
    return (randn(ROWS, width, dtype=torch.bfloat16, device=device) for width in (K, N))


def scales(module):
    """The state of delayed scaling."""
    kept = [module.fp8_meta[name] for name in ("scaling_fwd", "scaling_bwd") if name in module.fp8_meta]
    return [t.clone() for state in kept if hasattr(state, "amax_history") for t in (state.scale, state.amax_history)]


def assert_same_steps(ours, twin, splits, recipe, device):
    """Two steps give equal outputs, input gradients, parameters' gradients and scales."""
    for turn in range(2):
        x, dy = draw(device)
        for a, b, what in zip(step(ours, x, dy, splits, recipe), step(twin, x, dy, splits, recipe), ("y", "dx")):
            assert_same_bits(a, b, f"{what} of step {turn}")
    for (name, p), q in zip(ours.named_parameters(), twin.parameters(), strict=True):
        for kind in ("grad", "main_grad"):
            a, b = getattr(p, kind, None), getattr(q, kind, None)
            assert (a is None) == (b is None), f"{name}.{kind}"
            if a is not None:
                assert_same_bits(a, b, f"{name}.{kind}")
    for a, b in zip(scales(ours), scales(twin), strict=recipe is not None):  # without a recipe they are not used
        assert_same_bits(a, b, "scales")


@contextmanager
def unharmed(ours, splits, recipe, device, mend=lambda module: None):
    """The block is refused by a module that has run a step."""
    x, dy = draw(device)
    step(ours, x, dy, splits, recipe)
    twin = copy.deepcopy(ours)
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):  # which copies leave behind
        q.grad = None if p.grad is None else p.grad.clone()
    yield
    mend(ours), mend(twin)
    assert_same_steps(ours, twin, splits, recipe, device)


BUFFERS = {
    "a row less": lambda good: good[:-1],
    "a column less": lambda good: torch.empty(ROWS, K - 1, dtype=good.dtype, device=good.device),
    "one dimension": lambda good: good.view(-1),
    "its columns in order": lambda good: good.t().contiguous().t(),
    "a pitch": lambda good: torch.empty(ROWS, K + 8, dtype=good.dtype, device=good.device)[:, :K],
    "another dtype": lambda good: good.float(),
    "requires a gradient": lambda good: good.clone().requires_grad_(),
    "no tensor": lambda good: [1.0],
    "elsewhere": lambda good: good.to("meta"),
}


@either
@every_recipe
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_bad_dgrad_out(kind, recipe, on_device, device):
    """Before anything is computed, where there is a gradient to write."""
    ours, _ = build(device=device, dtype=torch.bfloat16)
    made, splits = RECIPES[recipe] and RECIPES[recipe](), splits_of(on_device, device)
    bad = BUFFERS[kind](torch.zeros(ROWS, K, dtype=torch.bfloat16, device=device))
    with unharmed(ours, splits, made, device):
        x, _ = draw(device)
        out = torch.full((ROWS, N), 7.0, dtype=torch.bfloat16, device=device)
        with te.autocast(enabled=made is not None, recipe=made), refused(ValueError, "'dgrad_out'", "contiguous"):
            ours(x.requires_grad_(), splits, out=out, dgrad_out=bad)
        assert (out == 7).all()


@either
@every_recipe
@pytest.mark.parametrize("late", [False, True])
def test_a_missing_main_grad(late, recipe, on_device, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True, delay_wgrad_compute=late)
    give_main_grads([ours])
    made, splits = RECIPES[recipe] and RECIPES[recipe](), splits_of(on_device, device)
    with unharmed(ours, splits, made, device, lambda module: give_main_grads([module])):
        del ours.weight1.main_grad
        x, _ = draw(device)
        with te.autocast(enabled=made is not None, recipe=made), refused(ValueError, "'weight1'", "main_grad"):
            ours(x.requires_grad_(), splits)
        assert (ours.weight1.grad is None) == (ours.weight0.grad is None)


@either
@pytest.mark.filterwarnings("ignore:.*its quantizers are made again")
@pytest.mark.parametrize("then", ["none", "current", "block"])
def test_a_kept_input_with_delayed_scaling(then, on_device, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, save_original_input=True)
    made, splits = RECIPES[then] and RECIPES[then](), splits_of(on_device, device)
    with unharmed(ours, splits, made, device):
        x, _ = draw(device)
        with te.autocast(recipe=R.DelayedScaling()), refused(ValueError, "'save_original_input'"):
            ours(x.requires_grad_(), splits)
