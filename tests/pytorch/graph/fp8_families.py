# Shared by the tests of captured modules under quantization: a layer, and every recipe. No test is here.
import pytest

from .cases import layer as transformer_layer
from .fp8_cases import RECIPES

every_recipe = pytest.mark.parametrize("name", RECIPES)
delayed = pytest.mark.parametrize("name", ["delayed"])


def layer(**options):
    return transformer_layer(attention_dropout=0.0, **options)
