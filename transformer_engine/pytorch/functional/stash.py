"""Pages that live rows take when all rows are alive. What is stashed, and when, is stash's."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C


def stash_most_pages(tensors: Sequence[torch.Tensor], page_bytes: int) -> int:
    """ceil(sum of each tensor's bytes, rounded up to 128 / page_bytes): what a group of them takes at most.

    Shapes: any of one dimension or more; contiguous, 1 to 16 tensors. Units: page_bytes in bytes, a multiple of 128.
    Errors: ValueError naming the argument.
    """
    return _C.stash_most_pages(list(tensors), page_bytes)
