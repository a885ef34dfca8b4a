"""The tensors of a group in one buffer: names that wait for grouped linear layers."""

import torch

from transformer_engine.pytorch._absent import absent


@absent("grouped tensors are")
class GroupedTensorStorage:
    """The tensors of a group in one buffer."""


@absent("grouped tensors are")
class GroupedTensor(GroupedTensorStorage, torch.Tensor):
    """The tensors of a group in one buffer."""
