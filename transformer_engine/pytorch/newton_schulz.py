"""Newton-Schulz iteration over several GPUs: the names that clients import. Not available in this version."""

import torch

from transformer_engine.pytorch._internal.absent import absent

_CUSOLVER = "cuSolverMp is"


@absent(_CUSOLVER)
class CusolverMpCtx:
    """A group of ranks that share a matrix."""


@absent(_CUSOLVER, "iterate with torch.mm")
def newton_schulz(
    x: torch.Tensor, ctx: CusolverMpCtx, num_iterations: int = 5, coefficients: list[float] | None = None
) -> None:
    """The orthogonal factor of x."""
