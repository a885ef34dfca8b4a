# Shared by the tests of offload inside of captures. No test is here.
from support import assert_same_bits

import transformer_engine.pytorch as te

HIDDEN, FFN, LAYERS, K = 64, 128, 4, 2


def build(device, **options):
    return [te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", device=device, **options) for _ in range(LAYERS)]


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")
