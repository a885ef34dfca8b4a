"""The three FP8 recipes of the benchmarks: a module called inside te.autocast, as a user would. Measures nothing."""

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=16),  # the length of the peer's figures
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


class Quantized(torch.nn.Module):
    """`module` called inside autocast with a recipe; weights are quantized in every step, or in the first one alone if
    they are cached, as for the microbatches of a step."""

    def __init__(self, module, name, cached=False):
        super().__init__()
        self.module, self.recipe, self.is_first = module, RECIPES[name], True if cached else None

    def forward(self, *args):
        told = {} if self.is_first is None else {"is_first_microbatch": self.is_first}
        with te.autocast(recipe=self.recipe):
            result = self.module(*args, **told)
        self.is_first = self.is_first and False  # None stays
        return result


def pairs():
    """(recipe, suffix of the op, whether weights are cached) of each row in FP8."""
    return [(name, suffix, cached) for suffix, cached in (("", False), ("_cached", True)) for name in RECIPES]
