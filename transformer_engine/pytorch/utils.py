"""Small queries and helpers that clients import: capabilities of the device, NVTX ranges, initialisers, parts of
tensors, the layout of gated weights."""

import functools
import math
from collections.abc import Callable

import torch

from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch._internal.torch_private import construct_storage_from_data_pointer

gpu_autocast_ctx = functools.partial(torch.amp.autocast, device_type="cuda")


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device a module is built on: the given one, by default CUDA if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _need_cuda(op: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{op}: torch {torch.__version__} finds no CUDA device, wanted one; see te.doctor().")


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current CUDA device."""
    _need_cuda("get_device_compute_capability")
    return torch.cuda.get_device_capability()


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the device computes in bfloat16 (the CPU does; a GPU from compute capability 8.0); with return_reason
    also why not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0):
        available, reason = True, ""
    else:
        available, reason = False, "bfloat16 needs a GPU of compute capability 8.0 or higher."
    return (available, reason) if return_reason else available


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that torch uses; (0, 0, 0) without one."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        return 0, 0, 0
    scale = 10000 if version >= 90000 else 1000  # from 9.0 on, versions are written with five digits
    return version // scale, version % scale // 100, version % 100


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether FP8 products exist in other layouts than TN: from compute capability 10.0 on. Before that, and on the
    CPU, an operand's columnwise data are its transpose."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`. Errors: ValueError for a multiple below 1."""
    if multiple < 1:
        raise ValueError(
            f"round_up_to_nearest_multiple: argument 'multiple' is {multiple!r}, wanted a whole number, at least 1."
        )
    return -(-value // multiple) * multiple


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An initialiser: N(0, sigma), in place."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """An initialiser: N(0, sigma / sqrt(2 num_layers)), in place; for layers that add to the residual stream."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def get_default_init_method() -> Callable[[torch.Tensor], torch.Tensor]:
    """The default initialiser of weights: N(0, 0.023), in place."""
    return init_method_normal(0.023)


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator. Errors: ValueError unless the result is a whole number."""
    if numerator % denominator:
        raise ValueError(f"divide: argument 'numerator' is {numerator}, wanted a multiple of {denominator}.")
    return numerator // denominator


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in this dtype; itself if it has it, None for None."""
    return None if tensor is None else tensor.to(dtype)


class SplitAlongDim:
    """By the name of an autograd function: torch.split, which is differentiable."""

    @staticmethod
    def apply(
        mixed_x_layer: torch.Tensor, split_dim: int, split_size_or_sections: int | list[int], squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Views of its parts along split_dim; squeeze: without that dimension, if a part has size 1 in it."""
        parts = torch.split(mixed_x_layer, split_size_or_sections, split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else tuple(parts)


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """The dtype in which torch.autocast computes on a GPU."""
    return torch.get_autocast_dtype("cuda")


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Whether FP8 units support it without padding: [a multiple of 8, a multiple of 16]. Modules support any shape."""
    return tensor.dim() == 2 and tensor.shape[0] % 8 == 0 and tensor.shape[1] % 16 == 0


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """attention_scores, in place -10000 where the mask is True."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def nvtx_range_push(msg: str) -> None:
    """Opens an NVTX range; nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """Closes the innermost NVTX range; nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


def make_weak_ref(x: object) -> object:
    """The tensors in x (alone, or in tuples, lists and dicts), at the same addresses, without keeping their memory
    alive; other objects unchanged. For use only while another owner keeps that memory alive, such as a CUDA graph's
    pool."""
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        weak = construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(weak, x.storage_offset(), x.shape, x.stride())
    if isinstance(x, tuple | list):
        parts = [make_weak_ref(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, dict):
        return {key: make_weak_ref(value) for key, value in x.items()}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise TypeError(f"make_weak_ref: argument 'x' has a {type(x).__name__}, wanted tensors, numbers and containers.")


def _check_glu(op: str, tensor: torch.Tensor, interleave_size: int) -> None:
    check_tensor(op, "tensor", tensor)
    if interleave_size < 1 or tensor.dim() < 1 or tensor.shape[0] % (2 * interleave_size):
        raise ValueError(
            f"{op}: argument 'interleave_size' is {interleave_size} for a tensor of shape {tuple(tensor.shape)}, "
            "wanted a size of at least 1 of which the first dimension is an even multiple."
        )


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """[gate | up] along the first dimension as alternating blocks of interleave_size rows: gate, up, gate, up, ..."""
    _check_glu("interleave_glu_tensor", tensor, interleave_size)
    blocks = tensor.shape[0] // (2 * interleave_size)
    return tensor.unflatten(0, (2, blocks, interleave_size)).transpose(0, 1).flatten(0, 2).contiguous()


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of interleave_glu_tensor."""
    _check_glu("deinterleave_glu_tensor", tensor, interleave_size)
    blocks = tensor.shape[0] // (2 * interleave_size)
    return tensor.unflatten(0, (blocks, 2, interleave_size)).transpose(0, 1).flatten(0, 2).contiguous()
