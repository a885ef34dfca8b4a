"""The norms of queries and keys, over one head each. MultiheadAttention chooses among them."""

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.torch_autocast import is_autocast, to_autocast
from transformer_engine.pytorch.module.base import check_choice
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.rmsnorm import RMSNorm


class L2Normalization(torch.nn.Module):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension: unit length, no parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        width = inp.shape[-1]
        # The RMS norm averages: its sum is width times smaller, so eps is too, and its root is sqrt(width) times
        # larger.
        gamma = torch.full((width,), width**-0.5, dtype=torch.float32, device=inp.device)
        options = {"rms": True, "eps": self.eps / width}
        if not is_autocast(inp):
            return functional.normalization(inp, gamma, **options)[0]
        inp = to_autocast(inp)
        with torch.autocast(inp.device.type, enabled=False):  # autocast would round gamma
            return functional.normalization(inp, gamma, **options)[0]

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def make_qk_norm(
    op: str,
    kind: str | None,
    head_dim: int,
    *,
    eps: float,
    params_dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    sequence_parallel: bool = False,
    tp_group: object | None = None,
    adds_up: int = 1,
) -> torch.nn.Module | None:
    """adds_up: the ranks over which the heads are divided, if the norm must add up the gradients of its parameters, of
    which each rank has a part. Under sequence_parallel the framework does it, as for all marked parameters."""
    check_choice(op, "qk_norm_type", kind, (None, "RMSNorm", "LayerNorm", "L2Normalization"))
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps)
    norm = RMSNorm if kind == "RMSNorm" else LayerNorm
    marked = {"sequence_parallel": True} if sequence_parallel else {}
    result = norm(head_dim, eps, params_dtype=params_dtype, device=device, **marked)
    result.tp_group, result.tp_size = tp_group, adds_up
    return result
