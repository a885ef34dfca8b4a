"""The capabilities of the machine, with reasons. A query starts no CUDA work, and changes nothing."""

from collections.abc import Callable

import torch

_BLACKWELL = "needs a Blackwell GPU (compute capability 10.0): only its hardware has these products."


def check_fp8_support() -> tuple[bool, str]:
    """(whether FP8 with a scale for each tensor works, why not). On a machine without CUDA it works on the CPU."""
    if not torch.cuda.is_available():
        return True, ""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) == (9, 0):
        return True, ""
    return False, (
        f"FP8 needs a GPU of compute capability 9.0 (Hopper), the current one has {major}.{minor}; on CPU tensors it "
        "works everywhere."
    )


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """(whether FP8 with a scale for each block works, why not)."""
    return check_fp8_support()


def check_mxfp8_support() -> tuple[bool, str]:
    """(False, why)."""
    return False, f"MXFP8 {_BLACKWELL}"


def check_nvfp4_support() -> tuple[bool, str]:
    """(False, why)."""
    return False, f"NVFP4 {_BLACKWELL}"


def _query(name: str, check: Callable[[], tuple[bool, str]]) -> Callable:
    def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
        available, reason = check()
        return (available, reason) if return_reason else available

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = "Whether it works on this machine; with return_reason (whether, why not)."
    return is_available


is_fp8_available = _query("is_fp8_available", check_fp8_support)
is_fp8_block_scaling_available = _query("is_fp8_block_scaling_available", check_fp8_block_scaling_support)
is_mxfp8_available = _query("is_mxfp8_available", check_mxfp8_support)
is_nvfp4_available = _query("is_nvfp4_available", check_nvfp4_support)
