"""One pool on one device, and the order of its calls: which point a store, a load or a drop runs behind
(csrc/stash/stash_calls.h). Sizes, when something is stashed and what of it comes back are the step's."""

from __future__ import annotations

import torch

from transformer_engine.pytorch import _C

POLICIES = {"ring": 0, "stack": 1, "bump": 2}
TAILS = _C.stash_tails
MOST_MEMBERS = _C.stash_most_members

Pool = _C.StashCalls


def make_pool(device: torch.device, lanes: _C.StashLanes, **options: object) -> Pool:
    return Pool(_C.StashPool(device, stream=lanes.current(), **options), lanes)
