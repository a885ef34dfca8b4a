# Pickles of versions that had all files of quantization in one folder: classes and functions load by the paths that
# these pickles name.
import pickle

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import quantization as Q

ROOT = "transformer_engine.pytorch.quantization"
MOVED = {  # file -> folder it is in now
    "availability": "recipes",
    "formats": "recipes",
    "products": "recipes",
    "recipe_state": "recipes",
    "contexts": "state",
    "manager": "state",
}


def earlier(value):
    """A pickle of `value` as a version without folders wrote it: the same, but for the paths."""
    data = pickle.dumps(value, 2)
    for file, folder in MOVED.items():
        data = data.replace(f"c{ROOT}.{folder}.{file}\n".encode(), f"c{ROOT}.{file}\n".encode())
    return data


@pytest.mark.parametrize(
    "value",
    [te.autocast, te.fp8_autocast, te.quantized_model_init, Q.FP8GlobalStateManager, Q.RecipeState, Q.get_fp8_max],
    ids=lambda value: value.__name__,
)
def test_a_name_loads_by_its_earlier_path(value):
    data = earlier(value)
    assert data != pickle.dumps(value, 2), "it has not moved"
    assert pickle.loads(data) is value


def test_the_default_recipe_loads_by_its_earlier_path():
    assert pickle.loads(f"c{ROOT}.surroundings\nget_default_recipe\n.".encode()) is Q.get_default_recipe


@pytest.mark.parametrize(
    "recipe",
    [R.DelayedScaling(amax_history_len=4), R.Float8BlockScaling(), R.Float8CurrentScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_recipe_state_loads_by_its_earlier_path(recipe):
    if recipe.delayed():
        state = Q.RecipeState.create(recipe, mode="forward", num_quantizers=3, device="cpu")
        state.scale.copy_(torch.tensor([1.0, 2.0, 4.0]))
        loaded = pickle.loads(earlier(state))
        assert type(loaded) is type(state)
        assert_same_bits(loaded.scale, state.scale)
        assert_same_bits(loaded.amax_history, state.amax_history)
    else:
        kind = type(Q.RecipeState.create(recipe, mode="forward", device="cpu"))
        assert pickle.loads(earlier(kind)) is kind
