# Inputs and gradients that are negated views, or that have strides of 0, give the bits of contiguous ones: the parts of
# a mixture besides permute, which has its own suite.
import pytest
import torch
from support import assert_same_bits, negated_view, randn

from transformer_engine.pytorch import functional, router
from transformer_engine.pytorch.moe import GroupedMLP

from .cases import FFN, HIDDEN

ROWS, SPLITS = 9, [4, 0, 5]


def scaled_activation(device):
    return lambda x, scale: functional.scaled_activation(x, scale, "swiglu"), [(ROWS, 2 * FFN), (ROWS,)]


def grouped_mlp(device):
    dtype = {"params_dtype": torch.float32, "device": device}
    module = GroupedMLP(3, HIDDEN, FFN, **dtype)
    return lambda x, scale: module(x, SPLITS, scale), [(ROWS, HIDDEN), (ROWS,)]


def choice(device):
    def function(logits, bias):
        return router.fused_topk_with_score_function(logits, 2, False, None, None, 2.0, "sigmoid", bias.detach())[0]

    return function, [(ROWS, 12), (12,)]


def scores(device):
    return lambda logits: router.fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")[1], [(ROWS, 12)]


def loss(device):
    tokens = torch.arange(12, device=device)
    return lambda probs: router.fused_moe_aux_loss(probs, tokens, ROWS, 12, 2, 0.5), [(ROWS, 12)]


@pytest.mark.parametrize("make", [scaled_activation, grouped_mlp, choice, scores, loss], ids=lambda f: f.__name__)
def test_views_give_the_bits_of_contiguous_tensors(make, device):
    function, shapes = make(device)
    plain = [randn(*shape, device=device) for shape in shapes]

    def step(values, grad):
        leaves = [t.detach().requires_grad_() for t in values]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad, allow_unused=True)]

    def assert_same(got, want):
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same_bits(a.reshape(-1), b.reshape(-1))

    grad = torch.randn(function(*plain).shape).to(device)
    want = step(plain, grad)
    assert_same(step(plain, negated_view(grad)), want)
    assert_same(step([negated_view(t) for t in plain], grad), want)
    one = torch.randn([1] * grad.dim()).to(device).expand_as(grad)
    assert_same(step(plain, one), step(plain, one.contiguous()))
