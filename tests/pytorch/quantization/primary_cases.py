# Helpers of the suites of weights held in FP8 alone: a layer, its scales and values that fit them. No test is here.
import torch
from quantized_cases import E4M3

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

LENGTH = 4


def rule(**options):
    return DelayedScaling(**{"amax_history_len": LENGTH, **options})


def linear(device, size=32, recipe=None, **options):
    with te.quantized_model_init(recipe=rule() if recipe is None else recipe):
        return te.Linear(size, size, device=device, **options)


def forward_backward(module, recipe=None, size=32):
    weight = module.weight
    with te.autocast(recipe=rule() if recipe is None else recipe):
        y = module(torch.ones(4, size, device=weight.device, dtype=weight.dtype))
    y.sum().backward()


def by_scale(values, scale):
    return te.Float8Quantizer(scale.view(1), torch.zeros(1, device=scale.device), E4M3)(values)


def fitting(values, margin=0):
    """By one rounding: number / tensor has two."""
    amax = values.abs().amax().float()
    return torch.full_like(amax, 448.0) / amax / 2.0**margin


def forward_scale(module, product=0):
    return module.fp8_meta["scaling_fwd"].scale[3 * product + 1]


def newest_amax(module, product=0):
    return module.fp8_meta["scaling_fwd"].amax_history[0, 3 * product + 1]
