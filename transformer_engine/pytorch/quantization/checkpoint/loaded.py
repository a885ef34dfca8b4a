"""Scales and amax histories that were read from a checkpoint, and the errors of reading them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import DelayedScaling


class Unfit(ValueError):
    """State that cannot be loaded; its text continues "the checkpoint's '_extra_state'"."""


class Foreign(Unfit):
    """Valid state, for tensors or a format that the module does not have: the rest of the checkpoint loads."""


class Loaded(NamedTuple):
    """The state of one direction, on the CPU."""

    rule: DelayedScaling
    scale: torch.Tensor
    amax_history: torch.Tensor

    @classmethod
    def checked(cls, rule: DelayedScaling, scale: torch.Tensor, history: torch.Tensor) -> Loaded:
        """Under the rule, with the length of the history. Errors: Unfit."""
        if not bool(((scale > 0) & (scale < math.inf)).all()) or bool((history < 0).any()):
            raise Unfit("holds a scale that is not a positive number, or a negative amax")
        own = DelayedScaling(margin=rule.margin, fp8_format=rule.fp8_format, amax_history_len=len(history))
        return cls(own, scale, history)
