"""Helpers of the suites of fused_linear_cross_entropy: operands, chunks, recipes. No test is here."""

import contextlib

import torch

from transformer_engine.common import recipe
from transformer_engine.pytorch import _C

IGNORED = -100
FEATURES = 24
RECIPES = {"current": recipe.Float8CurrentScaling(), "block": recipe.Float8BlockScaling()}


@contextlib.contextmanager
def chunks_of(logits_bytes):
    before = _C.set_linear_cross_entropy_chunk_bytes(logits_bytes)
    try:
        yield
    finally:
        _C.set_linear_cross_entropy_chunk_bytes(before)


def draw(device, tokens, classes, dtype=torch.float32, features=FEATURES, bias=True):
    hidden = torch.randn(tokens, features).to(device, dtype).requires_grad_()
    weight = (torch.randn(classes, features) * 0.3).to(device, dtype).requires_grad_()
    shift = torch.randn(classes).to(device, dtype).requires_grad_() if bias else None
    target = torch.randint(0, classes, (tokens,))
    if tokens > 2:
        target[1::5] = IGNORED
    return hidden, weight, shift, target.to(device)
