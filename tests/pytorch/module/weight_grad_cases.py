# The modules that have weights, and steps of them: what module/test_weight_grad.py and module/test_main_grad.py share.
# No test here.
import pytest
import torch
from plain_modules import randomize
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

IN, TOKENS = 32, (5, 3)
SPLIT = {"query": 24, "key": 8, "value": 8}


def linear(**options):
    return te.Linear(IN, 40, **options)


def split_linear(**options):
    return te.Linear(IN, 40, parameters_split=SPLIT, **options)


def norm_linear(**options):
    return te.LayerNormLinear(IN, 40, **options)


def split_norm_linear(**options):
    return te.LayerNormLinear(IN, 40, parameters_split=SPLIT, normalization="RMSNorm", **options)


def mlp(**options):
    return te.LayerNormMLP(IN, 24, activation="swiglu", **options)


def recomputed_mlp(**options):
    return te.LayerNormMLP(IN, 24, activation="geglu", checkpoint=True, **options)


def recomputed_norm(**options):
    return te.LayerNormMLP(IN, 24, activation="srelu", recompute_norm_output=True, **options)


FAMILIES = [linear, split_linear, norm_linear, split_norm_linear, mlp, recomputed_mlp, recomputed_norm]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


def build(family, device, dtype=torch.float32, **options):
    return randomize(family(device=device, params_dtype=dtype, **options))


def twins(family, device, dtype=torch.float32, **options):
    """The module with the options, and one without any that has the same parameters."""
    module, immediate = build(family, device, dtype, **options), build(family, device, dtype)
    immediate.load_state_dict(module.state_dict())
    return module, immediate


def weights(module):
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def with_main_grads(module, dtype=torch.float32, value=None):
    for p in weights(module).values():
        p.main_grad = (
            randn(*p.shape, dtype=dtype, device=p.device) if value is None else torch.full_like(p, value).to(dtype)
        )
    return module


def microbatch(device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*TOKENS, IN, generator=generator).to(dtype).to(device)
    return x.requires_grad_(), generator


def backward(module, x, generator, **options):
    y = module(x, **options)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return y


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_gradients(got, want):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_same_bits(got[name], gradient, name)
