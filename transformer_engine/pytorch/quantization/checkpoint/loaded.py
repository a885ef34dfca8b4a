"""What a checkpoint's scales and amax histories are once they have been read, and the errors of reading them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from transformer_engine.common.recipe import DelayedScaling


class Unfit(ValueError):
    """State that cannot be taken; its text goes on behind "the checkpoint's '_extra_state'"."""


class Foreign(Unfit):
    """Whole state, of tensors or in a format that the module does not have: what is beside it loads all the same."""


class Loaded(NamedTuple):
    """Of one direction, on the CPU."""

    rule: DelayedScaling
    scale: torch.Tensor
    amax_history: torch.Tensor

    @classmethod
    def checked(cls, rule: DelayedScaling, scale: torch.Tensor, history: torch.Tensor) -> Loaded:
        """Under the rule, whose length is the history's. Errors: Unfit."""
        if not bool(((scale > 0) & (scale < math.inf)).all()) or bool((history < 0).any()):
            raise Unfit("holds a scale that is no positive number, or a negative amax")
        own = DelayedScaling(margin=rule.margin, fp8_format=rule.fp8_format, amax_history_len=len(history))
        return cls(own, scale, history)
