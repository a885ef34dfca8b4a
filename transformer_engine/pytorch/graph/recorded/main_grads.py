"""Which parameters' gradients the modules of this library add to main_grad themselves, and where that lies."""

from typing import NamedTuple

import torch

from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def fused_weights(module: object) -> list[torch.nn.Parameter]:
    """The parameters whose gradients the modules of this library add to main_grad themselves."""
    return [p for part in our_modules(module) for p in own_fused(part)]


def own_fused(part: TransformerEngineBaseModule) -> list[torch.nn.Parameter]:
    """As above, of one module without its submodules: there every matrix is a product's weight."""
    if not part.fuse_wgrad_accumulation:
        return []
    return [p for p in part.parameters(recurse=False) if p.dim() == 2 and p.requires_grad]


def main_grad_of(weight: torch.nn.Parameter) -> torch.Tensor | None:
    return weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)


class Fused(NamedTuple):
    """A weight, and where its main_grad was when the graph was captured."""

    weight: torch.nn.Parameter
    address: int

    @classmethod
    def of(cls, weight: torch.nn.Parameter) -> "Fused":
        return cls(weight, main_grad_of(weight).data_ptr())
