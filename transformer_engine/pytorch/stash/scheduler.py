"""The schedulers before and behind a group's layers: identities that act when forward and backward pass them."""

from __future__ import annotations

from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.saved import is_recorded
from transformer_engine.pytorch.stash.step import Stash


def pre(stash: Stash, x: torch.Tensor) -> torch.Tensor:
    if not is_recorded():
        return x
    step = stash.step
    step.before_forward()
    return _C.stash_pass(x, step.load_ahead) if x.requires_grad else x


def post(stash: Stash, y: torch.Tensor) -> torch.Tensor:
    if not is_recorded():
        return y
    step = stash.step
    if not y.requires_grad:  # nothing behind it has a backward
        step.visit = None
        return y
    return _C.stash_pass(y, partial(step.before_backward, step.after_forward()))
