# Helpers of the suites of every module with parameters: one of each module, and its tokens. No test is here.
import io

import pytest
import torch
from plain_modules import randomize
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, BATCH = 32, 24, 4, 6, 2
NO_DROPOUT = {"attention_dropout": 0.0}

MODULES = {
    "Linear": lambda **options: te.Linear(HIDDEN, FFN, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(
        HIDDEN, FFN, parameters_split=["a", "b"], return_layernorm_output=True, **options
    ),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options),
    "MultiheadAttention": lambda **options: te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=2, input_layernorm=True, **NO_DROPOUT, **options
    ),
    "TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, normalization="RMSNorm", hidden_dropout=0.0, **NO_DROPOUT, **options
    ),
}
every_module = pytest.mark.parametrize("name", MODULES)


def build(name, device, dtype=torch.float32, **options):
    return randomize(MODULES[name](params_dtype=dtype, device=device, **options))


def tokens(device, dtype=torch.float32, *lead, **options):
    return randn(*(lead or (SEQ, BATCH)), HIDDEN, dtype=dtype, device=device, **options)


def same_bits(got, wanted, what=""):
    assert list(got) == list(wanted)
    for key in wanted:
        assert_same_bits(got[key], wanted[key], f"{what} {key}")


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
