"""te.ops, the fusible operations: its place. None is here yet; LayerNormLinear and LayerNormMLP are the fusions there
are."""

import torch

from transformer_engine.pytorch._absent import absent


@absent("fusible operations are", "use torch.nn.Sequential with LayerNormLinear and LayerNormMLP")
class Sequential(torch.nn.Module):
    """Operations one behind the other, fused where they can be."""

    def __init__(self, *args: torch.nn.Module) -> None: ...
