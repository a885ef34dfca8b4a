# The modules that the suites of tensor parallelism divide, with their options, recipes and tokens. No test is here.
import dataclasses

import torch
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, QParams

from .parallel_cases import HIDDEN, WIDE

TOKENS, BATCH = 16, 2
FP8 = 0.05  # of a tensor's norm: ranks have scales of their own where they have columns of their own
POWERS = QParams(power_2_scale=True)
RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(fp8_quant_fwd_inp=POWERS, fp8_quant_fwd_weight=POWERS, fp8_quant_bwd_grad=POWERS),
    "block": Float8BlockScaling(),
    "delayed": DelayedScaling(amax_history_len=2),
}
OVERRIDDEN = {
    f"{name}, {word}": dataclasses.replace(RECIPES[name], backward_override=word)
    for name in ("current", "block")
    for word in ("high_precision", "dequantized")
}
RECIPES |= OVERRIDDEN


class Own(te.Float8CurrentScalingQuantizer):
    """A quantizer of a caller: its result for a part may differ from the same rows of its result for the whole."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor)


def own_quantizer(role):
    return Own(te.DType.kFloat8E4M3, here())


def randn(*shape):
    return torch.randn(shape, device=here())


def linear(mode, dtype, **options):
    sizes = (HIDDEN, WIDE) if mode == "column" else (WIDE, HIDDEN)

    def make(tp_group=None, **more):
        divided = {"parallel_mode": mode, "tp_group": tp_group} if tp_group is not None else {}
        return te.Linear(*sizes, params_dtype=dtype, device=here(), **divided, **options, **more)

    return make


def norm_linear(dtype, **options):
    def make(tp_group=None, **more):
        divided = {"parallel_mode": "column", "tp_group": tp_group} if tp_group is not None else {}
        return te.LayerNormLinear(HIDDEN, WIDE, params_dtype=dtype, device=here(), **divided, **options, **more)

    return make


def mlp(dtype, **options):
    def make(tp_group=None, **more):
        divided = {"set_parallel_mode": True, "tp_group": tp_group} if tp_group is not None else {}
        return te.LayerNormMLP(HIDDEN, WIDE, params_dtype=dtype, device=here(), **divided, **options, **more)

    return make


def halves(sequence, mode):
    """Along which dimension a rank has a part of the inputs and of the outputs."""
    tokens = 0 if sequence else None
    return {"column": (tokens, -1), "row": (-1, tokens), "both": (tokens, tokens)}[mode]


def examples(kind, dtype, scale=1.0):
    torch.manual_seed(11)
    widths = {"column": (HIDDEN, WIDE), "row": (WIDE, HIDDEN), "both": (HIDDEN, HIDDEN)}[kind]
    rows = TOKENS * BATCH
    x = torch.randn(rows // BATCH, BATCH, widths[0], dtype=dtype)
    dy = torch.randn(rows // BATCH, BATCH, widths[1], dtype=dtype) * scale
    return x.to(here()), dy.to(here())


def accumulating(module):
    for name, parameter in module.named_parameters():
        if name.endswith("weight") and parameter.dim() == 2:
            parameter.main_grad = torch.full(parameter.shape, 0.5, device=parameter.device)


def columns(split):
    if not split:
        return None
    return list(split.values()) if isinstance(split, dict) else [WIDE // len(split)] * len(split)


MODULES = {
    "column": (lambda dtype, **o: linear("column", dtype, **o), "column", {}),
    "row": (lambda dtype, **o: linear("row", dtype, **o), "row", {}),
    "norm": (norm_linear, "column", {}),
    "mlp": (lambda dtype, **o: mlp(dtype, activation="swiglu", **o), "both", {"fc1_weight": 2, "fc1_bias": 2}),
    "mlp_gelu": (lambda dtype, **o: mlp(dtype, normalization="RMSNorm", **o), "both", {}),
}

# The options that are tested with each module, besides bias, sequence and recompute.
OPTIONS = {
    "column": [
        {},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
        {"parameters_split": {"q": 16, "k": 24, "v": 8}},
    ],
    "row": [
        {},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
    ],
    "norm": [
        {},
        {"recompute_norm_output": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "parameters_split": ("q", "k", "v")},
    ],
    "mlp": [
        {},
        {"checkpoint": True},
        {"recompute_norm_output": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "checkpoint": True},
    ],
    "mlp_gelu": [{}, {"checkpoint": True, "recompute_norm_output": True}, {"save_preactivation": "fp8"}],
}
