# Tensors that PyTorch negates as it reads them (torch._neg_view, conj().imag): their memory holds the negatives of
# their values, and the engine reads memory. Inputs are resolved; outputs are refused.
import copy

import pytest
import torch
from quantized_cases import FP8_FORMATS
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from ..graph.fp8_cases import RECIPES

pytestmark = pytest.mark.usefixtures("fp8_left_off")
MODULES = {
    "linear": lambda device: te.Linear(32, 32, device=device),
    "norm_linear": lambda device: te.LayerNormLinear(32, 32, device=device),
    "mlp": lambda device: te.LayerNormMLP(32, 48, activation="swiglu", device=device),
    "layernorm": lambda device: te.LayerNorm(32, device=device),
    "rmsnorm": lambda device: te.RMSNorm(32, device=device),
}


def negated(t):
    lazy = torch._neg_view(t.detach().neg())
    assert lazy.is_neg() and torch.equal(lazy, t)
    return lazy


def imaginary(t):
    lazy = torch.complex(torch.zeros_like(t), -t.detach()).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, t)
    return lazy


@pytest.mark.parametrize("lazy", [negated, imaginary])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", MODULES)
def test_inputs_and_incoming_gradients(device, name, recipe, lazy):
    module, x, dy = MODULES[name](device), randn(16, 32, device=device), randn(16, 32, device=device)
    results = []
    for own, given, incoming in ((module, x, dy), (copy.deepcopy(module), lazy(x), lazy(dy))):
        given.requires_grad_()
        with te.autocast(recipe is not None, recipe=RECIPES.get(recipe)):
            y = own(given)
        y.backward(incoming)
        results.append([y, given.grad, *(p.grad for p in own.parameters())])
    for want, got in zip(*results, strict=True):
        assert_same_bits(got.resolve_neg(), want)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_what_is_quantized(device, name):
    quantizer, x = FP8_FORMATS[name](device=device), randn(128, 128, device=device)
    assert_same_bits(quantizer(negated(x)).dequantize(), quantizer(x).dequantize())


def test_rope(device):
    freqs, t = te.RotaryPositionEmbedding(32)(16).to(device), randn(16, 2, 2, 32, device=device)
    want = apply_rotary_pos_emb(t, freqs, fused=True)
    assert_same_bits(apply_rotary_pos_emb(negated(t), negated(freqs), fused=True), want)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_gradients_of_a_step(device, kind):
    x, dx = randn(33, 5, device=device), randn(33, 5, device=device)
    plain, lazy = torch.nn.Parameter(x.clone()), torch.nn.Parameter(x.clone())
    plain.grad, lazy.grad = dx, negated(dx)
    for p in (plain, lazy):
        kind([p], lr=0.1).step()
    assert_same_bits(lazy.detach(), plain.detach())


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_parameters_of_a_step_are_refused(device, kind):
    p = torch.nn.Parameter(negated(torch.ones(4, device=device)))
    p.grad = torch.ones(4, device=device)
    with refused(ValueError, "negated", "resolve_neg()"):
        kind([p], lr=0.1).step()
    assert torch.equal(p, torch.ones_like(p))
