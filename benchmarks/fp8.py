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
    """`module` called inside autocast with a recipe; weights are quantized in every step."""

    def __init__(self, module, name):
        super().__init__()
        self.module, self.recipe = module, RECIPES[name]

    def forward(self, *args):
        with te.autocast(recipe=self.recipe):
            return self.module(*args)
