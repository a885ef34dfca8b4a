"""The schedulers before and behind a group's layers: identities that act when forward and backward pass them."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.saved import is_recorded
from transformer_engine.pytorch.stash.step import Stash, Step, Visit


class _Pre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, step: Step) -> torch.Tensor:
        ctx.step = step
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.step.load_ahead()
        return grad, None


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: torch.Tensor, step: Step, visit: Visit) -> torch.Tensor:
        ctx.step, ctx.visit = step, visit
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.step.before_backward(ctx.visit)
        return grad, None, None


def pre(stash: Stash, x: torch.Tensor) -> torch.Tensor:
    if not is_recorded():
        return x
    stash.step.before_forward()
    return _Pre.apply(x, stash.step) if x.requires_grad else x


def post(stash: Stash, y: torch.Tensor) -> torch.Tensor:
    if not is_recorded():
        return y
    if not y.requires_grad:  # nothing behind it has a backward
        stash.step.visit = None
        return y
    return _Post.apply(y, stash.step, stash.step.after_forward())
