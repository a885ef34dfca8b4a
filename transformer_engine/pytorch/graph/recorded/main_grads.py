"""The parameters whose gradients modules of this library add to main_grad, and the address of each main_grad."""

from typing import NamedTuple

import torch

from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def fused_weights(module: object) -> list[torch.nn.Parameter]:
    """The parameters whose gradients the modules of this library in `module` add to main_grad."""
    return [p for part in our_modules(module) for p in module_fused_weights(part)]


def module_fused_weights(part: TransformerEngineBaseModule) -> list[torch.nn.Parameter]:
    """The same for one module without its submodules; each matrix there, or stack of them, is the weight of a GEMM."""
    if not part.fuse_wgrad_accumulation:
        return []
    return [p for p in part.parameters(recurse=False) if p.dim() >= 2 and p.requires_grad]


def main_grad_of(weight: torch.nn.Parameter) -> torch.Tensor | None:
    return weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)


class FusedWeight(NamedTuple):
    """A weight, and the address of its main_grad at the capture."""

    weight: torch.nn.Parameter
    address: int

    @classmethod
    def of(cls, weight: torch.nn.Parameter) -> "FusedWeight":
        return cls(weight, main_grad_of(weight).data_ptr())
