# Each module with parameters, small, for the suites that treat it as clients do: with parameters that differ in every
# element, so that no loss of a name goes unseen. No test is here.
import torch

import transformer_engine.pytorch as te

HIDDEN, HEADS = 32, 4
SPLIT = ("query", "key", "value")
NO_DROPOUT = {"attention_dropout": 0.0}

MODULES = {
    "Linear": lambda **options: te.Linear(HIDDEN, 48, **options),
    "split Linear": lambda **options: te.Linear(HIDDEN, 48, parameters_split=SPLIT, **options),
    "unequal Linear": lambda **options: te.Linear(HIDDEN, 48, parameters_split={"q": 32, "k": 16}, **options),
    "split LayerNormLinear": lambda **options: te.LayerNormLinear(HIDDEN, 48, parameters_split=SPLIT, **options),
    "LayerNorm": lambda **options: te.LayerNorm(HIDDEN, **options),
    "RMSNorm": lambda **options: te.RMSNorm(HIDDEN, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, 64, **options),
    "GroupedLinear": lambda **options: te.GroupedLinear(3, HIDDEN, HIDDEN, **options),
    "GroupedLinear without bias": lambda **options: te.GroupedLinear(3, HIDDEN, HIDDEN, bias=False, **options),
    "MultiheadAttention": lambda **options: te.MultiheadAttention(HIDDEN, HEADS, **NO_DROPOUT, **options),
    "cross MultiheadAttention": lambda **options: te.MultiheadAttention(
        HIDDEN, HEADS, attention_type="cross", input_layernorm=True, **NO_DROPOUT, **options
    ),
    "TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, 64, HEADS, num_gqa_groups=2, hidden_dropout=0.0, **NO_DROPOUT, **options
    ),
    "decoder TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, 64, HEADS, layer_type="decoder", hidden_dropout=0.0, qk_norm_type="RMSNorm", **NO_DROPOUT, **options
    ),
}


def build(name, device="cpu", dtype=torch.float32, seed=0):
    """With parameters of `seed`."""
    module = MODULES[name](device=device, params_dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module


def values(module):
    """Copies of the parameters, by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}
