"""The pages that a group's tensors take if all of their rows are live. stash/ decides what is stashed, and when."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def stash_most_pages(tensors: Sequence[torch.Tensor], page_bytes: int) -> int:
    """ceil(sum of each tensor's bytes, rounded up to 128 / page_bytes): the most that a group of them takes.

    Shapes: any of one dimension or more; contiguous, 1 to 16 tensors. Units: page_bytes in bytes, a multiple of 128.
    Errors: ValueError naming the argument.
    """
    return _C.stash_most_pages(list(tensors), page_bytes)
