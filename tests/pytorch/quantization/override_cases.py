# Helpers of the suites of backward_override: parametrizations, a comparison, and a call's kept tensors. No test is
# here.
import pytest
from support import assert_same_bits, saved_tensors

from .override_reference import RECIPES, WORDS, around

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_word = pytest.mark.parametrize("word", WORDS)


def by_name(families):
    return pytest.mark.parametrize("family", families, ids=lambda f: f.__name__)


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        assert (got[name] is None) == (t is None), name
        if t is not None:
            assert_same_bits(got[name], t, name)


def kept_of(module, x, recipe, word):
    with saved_tensors() as kept, around(recipe, word):
        y = module(x)
    del y
    return kept
