"""Cross-entropy over a vocabulary that is spread over ranks: the name that clients import. It is not here yet."""

import torch

from transformer_engine.pytorch._absent import absent


@absent("the fused cross-entropy is", "use torch.nn.functional.cross_entropy")
def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: object | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """The loss of each token, its gradient computed in the forward."""
