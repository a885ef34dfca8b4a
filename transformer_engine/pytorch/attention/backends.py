"""Which of PyTorch's attention backends runs, and why: the one place where that is decided. It runs none itself."""

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from transformer_engine.pytorch.attention.masks import Pattern, Window, pattern_of

# cuDNN is the fastest on Hopper (forward + backward of a Llama-3-8B layer: 3.8 ms, flash 6.7 ms); its backward does
# not repeat its bits and it refuses to run under deterministic algorithms, where flash does and is next.
_FASTEST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
_MASKED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_BIAS_GRADIENT = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class AttentionPath(NamedTuple):
    """backends: in the order in which they are tried, those that cannot take the input passed over; None leaves the
    choice to torch (the CPU). pattern: what is seen, at these lengths. is_causal, mask_tensor: how the backend is told.
    repeat_groups: keys and values are repeated, one for each query head, as the backend takes no groups."""

    backends: tuple[SDPBackend, ...] | None
    pattern: Pattern
    is_causal: bool
    mask_tensor: bool
    repeat_groups: bool
    reason: str


def attention_path(
    device: torch.device,
    dtype: torch.dtype,
    *,
    mask: str,
    window: Window = None,
    bottom_right: bool | None = None,
    bias: str = "no_bias",
    bias_grad: bool = False,
    dropout: float = 0.0,
    deterministic: bool | None = None,
    seq_q: int | None = None,
    seq_kv: int | None = None,
) -> AttentionPath:
    """The path of a call whose arguments have been checked. seq_q, seq_kv None: equal, longer than any window."""
    pattern = pattern_of(mask, window, bottom_right).within(seq_q, seq_kv)
    bare = not (pattern.padding or pattern.arbitrary) and bias == "no_bias"
    is_causal = bare and pattern.top_left_causal
    mask_tensor = not (is_causal or (bare and not pattern.positional))
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    backends, reason = _order(device, dtype, mask_tensor, bias_grad, dropout, deterministic)
    # Of the backends that take a mask tensor on CUDA cuDNN alone takes groups; torch's fused CPU attention takes none.
    repeats = device.type != "cuda" or (mask_tensor and (bias_grad or deterministic or dtype == torch.float32))
    return AttentionPath(backends, pattern, is_causal, mask_tensor, repeats, reason)


_NODES = {
    "ScaledDotProductCudnnAttention": "cuDNN",
    "ScaledDotProductFlashAttentionForCpu": "torch's fused CPU attention",
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductEfficientAttention": "memory-efficient attention",
}


def path_taken(out: torch.Tensor, path: AttentionPath) -> tuple[str, str]:
    """For te.explain: the backend that made `out`, by its autograd node, and why no faster one did."""
    node = out.grad_fn.name() if out.grad_fn is not None else ""
    backend = _NODES.get(node.removesuffix("Backward0"), "torch's plain attention")
    return backend, "" if backend == "cuDNN" else path.reason


def _order(
    device: torch.device, dtype: torch.dtype, mask_tensor: bool, bias_grad: bool, dropout: float, deterministic: bool
) -> tuple[tuple[SDPBackend, ...] | None, str]:
    if device.type != "cuda":
        if bias_grad or dropout:
            why = "a gradient of the bias" if bias_grad else "dropout"
            return None, f"Torch's plain attention: its fused CPU attention has no {why.removeprefix('a ')}."
        return None, "Torch's fused CPU attention."
    if not mask_tensor:
        if deterministic:
            return _DETERMINISTIC, "Deterministic algorithms are on: flash repeats its bits, cuDNN's backward does not."
        if dtype == torch.float32:
            return _FASTEST, "float32: cuDNN and flash take 16-bit types alone, so memory-efficient attention is next."
        return _FASTEST, "cuDNN is the fastest on Hopper."
    if deterministic:
        return (SDPBackend.MATH,), (
            "Deterministic algorithms are on and the scores need a mask tensor, which flash does not take and which "
            "the others' backwards do not repeat their bits with."
        )
    if bias_grad:
        return _BIAS_GRADIENT, "The bias wants a gradient, which memory-efficient and plain attention alone give."
    if dtype == torch.float32:
        return _BIAS_GRADIENT, "float32 with a mask tensor: cuDNN takes 16-bit types alone, flash no mask tensor."
    return _MASKED, "The scores need a mask tensor: cuDNN is the fastest that takes one, flash takes none."
