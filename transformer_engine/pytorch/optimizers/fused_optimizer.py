"""FusedOptimizer: what FusedAdam and FusedSGD share: groups that are checked as they are added, and zero_grad()."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch


class FusedOptimizer(torch.optim.Optimizer):
    """A subclass sets _op, its name in messages, and checks a group in _check_added()."""

    _op: str

    def __init__(self, params: Iterable, defaults: dict[str, Any], set_grad_none: bool | None) -> None:
        if set_grad_none is not None:
            warnings.warn(
                f"{self._op}: argument 'set_grad_none' is deprecated, call zero_grad(set_to_none=...).",
                DeprecationWarning,
                stacklevel=3,
            )
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def _check_added(self) -> None:
        """Raises an error if the last group is not valid."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_added()
        except Exception:
            self.param_groups.pop()
            raise

    def _sets_to_none(self, set_to_none: bool | None) -> bool:
        return set_to_none if set_to_none is not None else self.set_grad_none is None or self.set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """set_to_none: gradients become None (the default), not 0."""
        super().zero_grad(set_to_none=self._sets_to_none(set_to_none))
