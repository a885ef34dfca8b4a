# Helpers of the suites of normalization: inputs of every kind, float64's norm, bounds. No test is here.
from dataclasses import dataclass

import pytest
import torch

from transformer_engine.pytorch.functional import normalization

EPS = 1e-5
BOTH = pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])


@dataclass
class Inputs:
    x: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor | None
    residual: torch.Tensor | None
    rms: bool
    zero_centered: bool = False

    def run(self, **changed):
        kept = {"x": self.x, "gamma": self.gamma, "beta": self.beta, "residual": self.residual} | changed
        return normalization(**kept, rms=self.rms, eps=EPS, zero_centered_gamma=self.zero_centered)

    def leaves(self):
        return [t for t in (self.x, self.residual, self.gamma, self.beta) if t is not None]

    def gradients(self, dy, dh=None):
        """Of (x, residual, gamma, beta), those that are there."""
        outputs = self.run()
        grads = (dy, dh) if self.residual is not None and dh is not None else (dy,)
        return torch.autograd.grad(outputs[: len(grads)], self.leaves(), grads)

    def copy(self):
        parts = [None if t is None else t.detach().clone().requires_grad_() for t in (self.x, self.gamma, self.beta)]
        residual = None if self.residual is None else self.residual.detach().clone().requires_grad_()
        return Inputs(*parts, residual, self.rms, self.zero_centered)


def draw(shape, dtype, device, *, rms, residual=False, zero_centered=False, gamma_dtype=None, beta=True, shift=0.5):
    def make(*size, like=dtype, offset=0.0):
        return (torch.randn(*size) + offset).to(like).to(device).requires_grad_()

    like = gamma_dtype or dtype
    return Inputs(
        make(*shape, offset=shift),
        make(shape[-1], like=like),
        make(shape[-1], like=like) if beta and not rms else None,
        make(*shape) if residual else None,
        rms,
        zero_centered,
    )
