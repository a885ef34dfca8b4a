"""Selects the backend of attention, one of PyTorch's or a kernel of functional.attention, with a reason: the only
place that does. It computes nothing."""

import os
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from transformer_engine.pytorch._internal.torch_private import current_flash_attention_impl
from transformer_engine.pytorch.attention.masks import Pattern, Window, pattern_of

# cuDNN is the fastest on Hopper (forward + backward of a Llama-3-8B layer: 3.8 ms, flash 6.7 ms); its backward does
# not repeat its bits and it refuses to run under deterministic algorithms, where flash does and is next.
_FASTEST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_FASTEST[2:])
_WITHOUT_FLASH = (SDPBackend.CUDNN_ATTENTION, *_FASTEST[2:])
_DETERMINISTIC = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
_MASKED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_BIAS_GRADIENT = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

# Variables of the environment that disable a backend if they are 0.
_VARIABLES = {
    "NVTE_FLASH_ATTN": (SDPBackend.FLASH_ATTENTION, "flash"),
    "NVTE_FUSED_ATTN": (SDPBackend.CUDNN_ATTENTION, "cuDNN"),
    "NVTE_UNFUSED_ATTN": (SDPBackend.MATH, "the plain one"),
}
_FUSED = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")


def taken_away() -> frozenset[str]:
    """The variables that are 0 at present."""
    return frozenset(name for name in _VARIABLES if _is_zero(name, os.environ.get(name, "1"), "without it"))


def repeats_bits() -> bool:
    """Whether NVTE_ALLOW_NONDETERMINISTIC_ALGO is 0: backwards repeat their bits without torch's global flag."""
    value = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    return _is_zero("NVTE_ALLOW_NONDETERMINISTIC_ALGO", value, "backwards repeat their bits")


def _is_zero(name: str, value: str, meaning: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"DotProductAttention: the environment's {name} is {value!r}, wanted 0 ({meaning}) or 1.")
    return value == "0"


class AttentionPath(NamedTuple):
    """backends: in the order in which they are tried; those that do not support the input are skipped; None leaves the
    choice to torch (the CPU). pattern: the visible keys, at these lengths. It reaches the backend as is_causal, as a
    mask tensor, or as flash's own window; or everything is visible. dtype: the backend's dtype of computation.
    repeat_groups: keys and values are repeated, one for each query head, because the backend supports no groups.
    kernel: of functional.attention, which computes and takes the pattern as it is; '': scaled_dot_product_attention.
    padding_outside: the causal mask hides the padding from tokens; padded inputs and results are zeroed, without a mask
    tensor. gradient: how the backward of the backends reads the incoming gradient: '' any, 'address' at addresses of
    whole 16 bytes, 'strides' with the strides of the result too. as_packed: the kernel takes the sequences of a batch
    as packed ones: with padding between them, where they lie, or, of padding masks, the tokens gathered by an index."""

    backends: tuple[SDPBackend, ...] | None
    dtype: torch.dtype
    pattern: Pattern
    is_causal: bool
    mask_tensor: bool
    flash_window: bool
    repeat_groups: bool
    reason: str
    kernel: str = ""
    padding_outside: bool = False
    gradient: str = ""
    as_packed: bool = False


# The widest head of flash in functional.attention, which pads heads, and a third of its sequences: those of padding
# count.
_WIDEST_FLASH = 256
_MOST_SEQUENCES = 21845


def flash_takes(head_dims: tuple[int, int]) -> bool:
    """Whether flash's own entry, which pads nothing, supports heads of these widths (q and k, v)."""
    return head_dims[0] == head_dims[1] <= 256 and head_dims[0] % 8 == 0


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
    repeat_bits: bool = False,
    seq_q: int | None = None,
    seq_kv: int | None = None,
    flash_fits: bool = True,
    away: Collection[str] = (),
    packed: bool = False,
    sink: bool = False,
    softcap: bool = False,
    max_logit: bool = False,
    widest_head: int = 0,
    same_lengths: bool = False,
    lengths: int = 0,
    masks: int = 0,
    flash_impl: str | None = None,
) -> AttentionPath:
    """The path of a call whose arguments have been checked. seq_q, seq_kv None: equal, longer than any window.
    deterministic None: torch's. repeat_bits: repeats_bits(), which counts where torch's flag is off or warns alone.
    flash_fits: there are keys to attend to, and flash_takes(its heads). away: of taken_away(). packed, sink, softcap,
    max_logit: thd, a softmax_type with a sink, a cap, return_max_logit. same_lengths: by cumulative lengths, each
    sequence has as many queries as keys. lengths: the number of sequences of a batch, 0: they do not become packed
    ones. masks: the tensors that give its padding, 0: cumulative lengths do. widest_head: the largest head_dim.
    flash_impl: of active_flash().
    RuntimeError if no backend is left."""
    pattern = given = pattern_of(mask, window, bottom_right).within(seq_q, seq_kv)
    outside = pattern.padding and pattern.right == 0 and same_lengths and seq_q == seq_kv and bias == "no_bias"
    outside = outside and not packed
    if outside:
        pattern = pattern._replace(padding=False, bottom_right=False)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if repeat_bits and deterministic:  # flash takes no notice of a flag that warns alone
            repeat_bits = torch.is_deterministic_algorithms_warn_only_enabled()
    needs = _needs_kernel(sink, softcap, max_logit)
    as_packed = pattern.padding and not dropout and 0 < lengths <= _MOST_SEQUENCES and bool(seq_q and seq_kv)
    as_packed = as_packed and (not masks or _keeps_order(pattern, masks))
    if sink and not (packed or softcap or max_logit or deterministic or repeat_bits or flash_impl):
        kernel = _kernel_of_batches(device, dtype, pattern, bias, flash_fits, widest_head, seq_q, seq_kv, away)
        if kernel:
            return AttentionPath((), dtype, pattern, False, False, False, False, needs, kernel, outside)
    if packed or needs or as_packed or (repeat_bits and not dropout):
        own_end = _own_end(pattern, packed or as_packed, same_lengths or masks == 1, seq_q, seq_kv)
        refused = _flash_refuses(device, dtype, widest_head, bias, softcap, max_logit, own_end)
        refused = refused or _impl_refuses(flash_impl, pattern, deterministic or repeat_bits)
        by_flash = not refused and "NVTE_FLASH_ATTN" not in away
        needs = _packed_reason(refused, by_flash) if packed else needs
        if by_flash:
            kernel = "flash_deterministic" if repeat_bits else "flash"
            pattern = Pattern(pattern.left, pattern.right, True, pattern.padding, pattern.arbitrary)
            why = needs or ((_BY_INDEX if masks else _AS_PACKED) if as_packed else _REPEATS)
            return AttentionPath(
                (), dtype, pattern, False, False, False, False, why, kernel, outside, as_packed=as_packed
            )
        if needs and "NVTE_UNFUSED_ATTN" in away:
            helps = ("NVTE_UNFUSED_ATTN",) if refused else ("NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")
            raise no_backend_left(helps, needs)
        if needs:
            return AttentionPath((), dtype, given, False, False, False, False, needs, "chunked")
    bare = not (pattern.padding or pattern.arbitrary) and bias == "no_bias"
    is_causal = bare and pattern.top_left_causal
    positional = bare and pattern.positional and not is_causal
    flash_window = (
        positional
        and device.type == "cuda"
        and dtype != torch.float32
        and flash_fits
        and not repeat_bits
        and not (dropout and flash_impl)
        and not _impl_refuses(flash_impl, pattern, deterministic)
        and "NVTE_FLASH_ATTN" not in away
        and (seq_q == seq_kv or (pattern.bottom_right and seq_q < seq_kv))  # flash's diagonal ends bottom right
    )
    mask_tensor = not bare or (positional and not flash_window)
    backends, reason = _order(
        device,
        dtype,
        mask_tensor=mask_tensor,
        flash_window=flash_window,
        bias_grad=bias_grad,
        dropout=dropout,
        deterministic=deterministic,
        repeat_bits=repeat_bits,
        flash_impl=flash_impl,
    )
    without_cudnn = bias_grad or deterministic or repeat_bits or dtype == torch.float32 or "NVTE_FUSED_ATTN" in away
    # Of the backends that take a mask tensor on CUDA only cuDNN supports groups; torch's fused CPU attention does not.
    repeats = device.type != "cuda" or (mask_tensor and without_cudnn)
    if away:
        if device.type != "cuda":
            plain = (SDPBackend.MATH,)
            backends = plain if bias_grad or dropout else (SDPBackend.FLASH_ATTENTION, *plain)
        # Only the plain backend and memory-efficient attention support float32, and the latter has no groups.
        repeats = repeats or dtype == torch.float32
        backends, reason = _left(backends, away, reason, device.type == "cuda")
    gradient = _gradient_read(device, dtype, backends)
    return AttentionPath(
        backends, dtype, pattern, is_causal, mask_tensor, flash_window, repeats, reason, "", outside, gradient
    )


def _gradient_read(device: torch.device, dtype: torch.dtype, backends: tuple[SDPBackend, ...] | None) -> str:
    """AttentionPath.gradient. Flash and memory-efficient attention make a gradient of other strides contiguous, and
    read a contiguous one 16 bytes at once without checking its address; cuDNN, of 16-bit types, checks neither."""
    if device.type != "cuda" or backends == (SDPBackend.MATH,):
        return ""
    by_cudnn = SDPBackend.CUDNN_ATTENTION in backends and dtype in (torch.float16, torch.bfloat16)
    return "strides" if by_cudnn else "address"


# Why flash is a kernel of functional.attention where scaled_dot_product_attention has one.
_AS_PACKED = "Padding by cumulative lengths: flash over the sequences as packed ones, without a mask tensor."
_BY_INDEX = "Padding by masks: flash over the tokens, which an index gathers, without a mask tensor."
_REPEATS = "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: flash, whose backward is made to repeat its bits; cuDNN's does not."


def active_flash() -> str | None:
    """The name of an implementation of flash in place of torch's own, if one is active."""
    return current_flash_attention_impl()


def _impl_refuses(flash_impl: str | None, pattern: Pattern, deterministic: bool) -> str:
    """Why an active implementation of flash does not take the call, or nothing."""
    if flash_impl is None:
        return ""
    if deterministic:
        return f"{flash_impl} is active in place of torch's flash; that its backward repeats its bits is not shown."
    if flash_impl != "FA3" and (pattern.left >= 0 or pattern.right > 0):
        return f"{flash_impl} is active in place of torch's flash; its backward has no window."
    return ""


# The widest head of cuDNN in functional.attention.
_WIDEST_CUDNN = 128


def _kernel_of_batches(
    device: torch.device,
    dtype: torch.dtype,
    pattern: Pattern,
    bias: str,
    flash_fits: bool,
    widest_head: int,
    seq_q: int | None,
    seq_kv: int | None,
    away: Collection[str],
) -> str:
    """The kernel of functional.attention that takes a batch with a sink, or '' where it is left to flash and chunked.
    cuDNN's and the memory-efficient one begin their diagonal top left and have no window."""
    if device.type != "cuda" or bias != "no_bias" or not flash_fits or 1 in (seq_q, seq_kv):
        return ""
    if pattern.padding or pattern.arbitrary or (pattern.positional and not pattern.top_left_causal):
        return ""
    if dtype in (torch.float16, torch.bfloat16):
        return "cudnn" if widest_head <= _WIDEST_CUDNN and "NVTE_FUSED_ATTN" not in away else ""
    return "efficient" if dtype == torch.float32 and not all(name in away for name in _FUSED) else ""


def _keeps_order(pattern: Pattern, masks: int) -> bool:
    """Whether tokens without the padding between them see the same keys: a mask may hide any of them. One mask hides as
    many queries as keys before each token, which a causal pattern does not notice; a window counts the hidden ones."""
    return not pattern.positional or (masks == 1 and pattern.left < 0 and pattern.right == 0)


def _own_end(pattern: Pattern, packed: bool, same_lengths: bool, seq_q: int | None, seq_kv: int | None) -> str:
    """Why flash does not take the visible keys, or nothing."""
    if not packed and (pattern.padding or pattern.arbitrary):
        return "It takes no mask tensor."
    if not pattern.positional:
        return ""
    if packed:
        fits = pattern.bottom_right or same_lengths
    else:
        if pattern.bottom_right and seq_q is not None and seq_q > seq_kv and pattern.right != 0:
            return "With more queries than keys it cuts a window beyond the diagonal."
        fits = pattern.bottom_right or seq_q == seq_kv
    if fits:
        return ""
    own = "Its diagonal ends bottom right, the mask's begins top left, and "
    if packed:
        return own + (
            "cu_seqlens_q and cu_seqlens_kv are two tensors; where the lengths are the same, pass one tensor as both."
        )
    return own + "there are not as many queries as keys."


def _packed_reason(refused: str, by_flash: bool) -> str:
    if refused:
        return f"Packed sequences (thd): flash does not take them here. {refused}"
    if by_flash:
        return "Packed sequences (thd): flash; cuDNN's entry for them is not used."
    return "NVTE_FLASH_ATTN=0: packed sequences (thd) without flash."


def _flash_refuses(
    device: torch.device,
    dtype: torch.dtype,
    widest_head: int,
    bias: str,
    softcap: bool,
    max_logit: bool,
    own_end: str,
) -> str:
    """Why flash does not take the call, or nothing. own_end: of _own_end()."""
    if device.type != "cuda":
        return "It runs on a GPU alone."
    if dtype not in (torch.float16, torch.bfloat16):
        return f"It takes 16-bit types alone, and the input is {dtype}."
    if widest_head > _WIDEST_FLASH:
        return f"Its widest head has {_WIDEST_FLASH} elements."
    if bias != "no_bias":
        return "Its backward has no ALiBi."
    if softcap or max_logit:
        return _needs_kernel(False, softcap, max_logit)
    return own_end


def _needs_kernel(sink: bool, softcap: bool, max_logit: bool) -> str:
    """Why no backend of torch takes the call, or nothing."""
    if sink:
        return "The softmax has a sink, which needs the log-sum-exp of each row; torch's attention does not return it."
    if softcap:
        return "The scores are soft-capped, which no backend of torch supports."
    return "The largest logit is returned, which no backend of torch supports." if max_logit else ""


def no_backend_left(away: Collection[str], reason: str) -> RuntimeError:
    """away: variables of which any one, set to 1, leaves a backend."""
    named = [name for name in _VARIABLES if name in away]
    return RuntimeError(
        f"DotProductAttention: no backend is left for this call: {', '.join(f'{name}=0' for name in named)} "
        f"{'disables' if len(named) == 1 else 'disable'} {' and '.join(_VARIABLES[name][1] for name in named)}; set "
        f"{'it' if len(named) == 1 else 'one of them'} to 1 before the module is made. {reason}"
    )


def _left(
    backends: tuple[SDPBackend, ...], away: Collection[str], reason: str, on_cuda: bool
) -> tuple[tuple[SDPBackend, ...], str]:
    """Without flash and cuDNN no fused backend is left: memory-efficient attention and the CPU's own have no variable,
    and are disabled with both."""
    gone = {_VARIABLES[name][0] for name in away if on_cuda or name not in _FUSED}
    if all(name in away for name in _FUSED):
        gone |= {SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION}
    left = tuple(backend for backend in backends if backend not in gone)
    if not left:
        raise no_backend_left(away, reason)
    if left[0] != backends[0]:
        reason = f"{' and '.join(f'{name}=0' for name in _VARIABLES if name in away)}: {reason}"
    return left, reason


_NODES = {
    "ScaledDotProductCudnnAttention": "cuDNN",
    "ScaledDotProductFlashAttentionForCpu": "torch's fused CPU attention",
    "ScaledDotProductFlashAttention": "flash",
    "FlashAttention": "flash",  # by its own entry, with a window
    "ScaledDotProductEfficientAttention": "memory-efficient attention",
}


def path_taken(out: torch.Tensor, path: AttentionPath) -> tuple[str, str]:
    """For te.explain: the backend that made `out`, by its autograd node, and why a faster one was not used."""
    if path.kernel:
        return path.kernel, path.reason
    backend, node, hops = None, out.grad_fn, 0
    while backend is None and node is not None and hops < 3:  # views may follow it: transposed, or padded heads
        backend = _NODES.get(node.name().removesuffix("Backward0"))
        node, hops = (node.next_functions[0][0] if node.next_functions else None), hops + 1
    backend = backend or "torch's plain attention"
    return backend, "" if backend == "cuDNN" else path.reason


def _order(
    device: torch.device,
    dtype: torch.dtype,
    *,
    mask_tensor: bool,
    flash_window: bool,
    bias_grad: bool,
    dropout: float,
    deterministic: bool,
    repeat_bits: bool,
    flash_impl: str | None,
) -> tuple[tuple[SDPBackend, ...] | None, str]:
    if device.type != "cuda":
        if bias_grad:
            return None, "The bias requires a gradient, which torch's fused CPU attention does not give."
        if dropout:
            return None, "Torch's fused CPU attention has no dropout."
        return None, "Torch's fused CPU attention is the fastest there."
    if flash_window:
        return (
            SDPBackend.FLASH_ATTENTION,
        ), "A sliding window: flash skips what is outside, cuDNN would need a tensor."
    if repeat_bits:
        return (SDPBackend.MATH,), (
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: the backwards of the others do not repeat their bits here."
        )
    if not mask_tensor:
        if deterministic and flash_impl:
            return (SDPBackend.MATH,), f"Deterministic algorithms are on: {_impl_refuses(flash_impl, None, True)}"
        if deterministic:
            return _DETERMINISTIC, "Deterministic algorithms are on: flash repeats its bits, cuDNN's backward does not."
        if dtype == torch.float32:
            return _FASTEST, "float32: cuDNN and flash take 16-bit types alone, so memory-efficient attention is next."
        if flash_impl and dropout:
            return _WITHOUT_FLASH, f"{flash_impl} is active in place of torch's flash, and has no dropout."
        if flash_impl:
            return _FLASH_FIRST, f"{flash_impl} is active in place of torch's flash, and is faster than cuDNN."
        return _FASTEST, "cuDNN is the fastest on Hopper."
    if deterministic:
        return (SDPBackend.MATH,), (
            "Deterministic algorithms are on and the scores need a mask tensor, which flash does not take and which "
            "the others' backwards do not repeat their bits with."
        )
    if bias_grad:
        return _BIAS_GRADIENT, "The bias requires a gradient, which only memory-efficient and plain attention give."
    if dtype == torch.float32:
        return _BIAS_GRADIENT, "float32 with a mask tensor: cuDNN takes 16-bit types alone, flash no mask tensor."
    return _MASKED, "The scores need a mask tensor: cuDNN is the fastest that takes one, flash takes none."
