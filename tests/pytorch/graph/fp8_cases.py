# Shared by the tests of captured callables under quantization: recipes, steps inside of an autocast, and the resulting
# scales. No test is here.
import copy

import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

from .cases import build, step, tokens

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "delayed, most recent": recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "current, high precision": recipe.Float8CurrentScaling(backward_override="high_precision"),
    "current, dequantized": recipe.Float8CurrentScaling(backward_override="dequantized"),
    "block, high precision": recipe.Float8BlockScaling(backward_override="high_precision"),
    "block, dequantized": recipe.Float8BlockScaling(backward_override="dequantized"),
}


def states(module):
    """name -> scales and histories of each module in it."""
    found = {}
    for name, part in module.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(part, "fp8_meta", {}).get(key)
            if state is not None:
                found[f"{name}.{key}.scale"] = state.scale.clone()
                found[f"{name}.{key}.amax_history"] = state.amax_history.clone()
    return found


def assert_same_states(got, want, what=""):
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bits(got[name], want[name], f"{what} {name}")


def capture(module, device, name, **options):
    return te.make_graphed_callables(
        module, (tokens(device, torch.bfloat16, grad=True),), enabled=True, recipe=RECIPES[name], **options
    )


def twins(family, device, **options):
    module = build(family, device, torch.bfloat16, **options)
    return module, copy.deepcopy(module)


def around(name):
    return te.autocast(enabled=True, recipe=RECIPES[name])


def fp8_step(module, x, seed, name, **kwargs):
    def call(x, **kwargs):
        with around(name):
            return module(x, **kwargs)

    return step(module, x, seed, call=call, **kwargs)
