# Checkpoints around checkpoints, and around outputs in FP8, under delayed scaling: the bits, the gradients and the
# scales of plain calls.
import copy

import pytest
import torch
from fp8_steps import RECIPES, all_scales, assert_same_tensors, grads_of, scales_of
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import activation_recompute_forward

pytestmark = pytest.mark.usefixtures("fp8_left_off")


class ByHand(torch.autograd.Function):
    """A checkpoint as frameworks write their own, around the phases alone."""

    @staticmethod
    def forward(ctx, call, recipe, x):
        ctx.call, ctx.recipe, ctx.x = call, recipe, x.detach()
        with activation_recompute_forward(True, False):
            return call(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.x.requires_grad_()
        with torch.enable_grad(), te.autocast(recipe=ctx.recipe), activation_recompute_forward(True, True):
            y = ctx.call(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


def checkpointed(way, recipe, call, x):
    if way == "by hand":
        return ByHand.apply(call, recipe, x)
    return te.checkpoint(call, x, use_reentrant=way == "reentrant")


def assert_same_steps(plain, other, twin, model, device, recipe, steps=3):
    """Steps of plain(x) with `model`, of other(x) with its twin."""
    for i in range(steps):
        x = randn(8, 16, device=device, scale=4.0**i, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        for call, source in ((plain, x), (other, again)):
            with te.autocast(recipe=recipe):
                y = call(source)
            y.square().sum().backward()
            if source is x:
                wanted = y
        assert_same_bits(y, wanted, f"y of step {i}")
        assert_same_bits(again.grad, x.grad, f"dx of step {i}")
        assert_same_tensors(grads_of(twin), grads_of(model))
        assert_same_tensors(all_scales(twin), all_scales(model))


@pytest.mark.parametrize("inner", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "not reentrant", "by hand"])
def test_a_checkpoint_inside_of_another(device, outer, inner):
    torch.manual_seed(0)
    model = torch.nn.ModuleList(
        [
            te.Linear(16, 16, device=device),
            te.LayerNormMLP(16, 32, device=device),
            te.LayerNormMLP(16, 32, checkpoint=True, device=device),
            te.Linear(16, 16, device=device),
        ]
    )
    twin, recipe = copy.deepcopy(model), RECIPES["delayed"]()

    def plain(x):
        return model[3](model[2](model[1](model[1](model[0](x)))))

    def pair(x):
        return twin[1](twin[1](x))

    def nested(x):
        h = checkpointed(inner, recipe, pair, twin[0](x))
        return twin[3](checkpointed(inner, recipe, twin[2], h))

    assert_same_steps(plain, lambda x: checkpointed(outer, recipe, nested, x), twin, model, device, recipe)


def test_three_checkpoints_deep(device):
    model = te.Linear(16, 16, device=device)
    twin, recipe = copy.deepcopy(model), RECIPES["delayed"]()

    def deep(x, ways=("reentrant", "not reentrant", "reentrant")):
        return checkpointed(ways[0], recipe, lambda t: deep(t, ways[1:]), x) if ways else twin(x)

    assert_same_steps(model, deep, twin, model, device, recipe)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "by hand"])
@pytest.mark.parametrize("family", [te.Linear, te.LayerNormLinear])
def test_a_recomputed_output_in_fp8(device, family, way):
    model = torch.nn.Sequential(family(16, 16, device=device), te.Linear(16, 16, device=device))
    twin, recipe = copy.deepcopy(model), RECIPES["delayed"]()

    def call(of, x):
        return of[1](of[0](x, fp8_output=True).dequantize())

    def again(x):
        return checkpointed(way, recipe, lambda t: call(twin, t), x)

    assert_same_steps(lambda x: call(model, x), again, twin, model, device, recipe)
    assert model[0].fp8_meta["scaling_fwd"].scale[2] != 1


@pytest.mark.parametrize("recorded", [True, False])
def test_an_output_in_fp8_leaves_no_amax_outside_of_training(device, recorded):
    model, recipe = te.Linear(16, 16, device=device), RECIPES["delayed"]()
    with te.autocast(recipe=recipe):
        model(randn(8, 16, device=device), fp8_output=True)
    model.train(not recorded)
    before = scales_of(model)
    for scale in (1.0, 100.0):
        with te.autocast(recipe=recipe), torch.set_grad_enabled(recorded):
            y = model(randn(8, 16, device=device, scale=scale), fp8_output=True)
    assert_same_tensors(scales_of(model), before)
    assert y.dequantize().abs().max() <= 1.01 * 448 / before["scale fwd"][2]
