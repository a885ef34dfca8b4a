# Gradients of some tensors alone, under every recipe: the requested ones are there, with the bits of a backward for
# all. Mutants: ask for the gradient of a product's output only where a direction of it is read (layer_backward in
# csrc/layer/backward.cpp), or count a gradient that has left column sums alone as none (Incoming::any there), turn
# these red.
import itertools

import pytest
import torch
from fp8_steps import RECIPES
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe


def gradients_alone(role):
    if "grad" not in role.tensor_type:
        return None
    return te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)


MODULES = {
    "Linear": lambda **options: te.Linear(24, 40, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(24, 40, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(24, 40, **options),
    "gated LayerNormMLP": lambda **options: te.LayerNormMLP(24, 40, activation="swiglu", **options),
    "recomputing LayerNormMLP": lambda **options: te.LayerNormMLP(24, 40, checkpoint=True, **options),
    "LayerNormMLP that packs": lambda **options: te.LayerNormMLP(24, 40, save_preactivation="fp8", **options),
}
ALL = RECIPES | {"gradients alone": lambda: CustomRecipe(qfactory=gradients_alone)}
pytestmark = pytest.mark.usefixtures("fp8_left_off")


def gradients(name, device, recipe, wanted, by_flags):
    """Of a new module, wanted by flags on the tensors or asked for by torch.autograd.grad()."""
    torch.manual_seed(0)
    module = MODULES[name](device=device)
    x = randn(20, 24, device=device)
    leaves = {"x": x, **dict(module.named_parameters())}
    for leaf_name, leaf in leaves.items():
        leaf.requires_grad_(leaf_name in wanted or not by_flags)
    with te.autocast(recipe=recipe):
        y = module(x)
    dy = randn(*y.shape, device=device)
    if not by_flags:
        return dict(
            zip(wanted, torch.autograd.grad(y, [leaves[n] for n in wanted], dy, allow_unused=True), strict=True)
        )
    y.backward(dy)
    return {leaf_name: leaf.grad for leaf_name, leaf in leaves.items() if leaf_name in wanted}


@pytest.mark.parametrize("by_flags", [True, False], ids=["flags", "autograd.grad"])
@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_some_are_those_of_all(device, name, recipe, by_flags):
    made = ALL[recipe]()
    leaves = ["x", *(leaf for leaf, _ in MODULES[name](device=device).named_parameters())]
    whole = gradients(name, device, made, leaves, by_flags)
    for count in range(1, len(leaves)):
        for wanted in itertools.combinations(leaves, count):
            for leaf, gradient in gradients(name, device, made, wanted, by_flags).items():
                assert gradient is not None, f"{leaf} of {wanted}"
                assert_same_bits(gradient, whole[leaf], f"{leaf} of {wanted}")
