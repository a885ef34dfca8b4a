"""Helpers of modules at the path where clients look for them."""

from transformer_engine.pytorch.functional import noop_cat as noop_cat
from transformer_engine.pytorch.module.weight_grad import WeightGradStore as WeightGradStore
