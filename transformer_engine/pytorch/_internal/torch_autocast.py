"""torch.autocast for modules that cast by themselves, because no op does it for them: the same rule as the ops' own
(csrc/core/common.h)."""

import torch


def is_autocast(t: torch.Tensor) -> bool:
    """Whether torch.autocast casts the tensor before an op reads it."""
    return (
        t.device.type in ("cpu", "cuda")
        and torch.is_autocast_enabled(t.device.type)
        and t.is_floating_point()
        and t.dtype is not torch.float64
    )


def to_autocast(t: torch.Tensor) -> torch.Tensor:
    """t in the dtype that torch.autocast computes in; t itself if autocast is off."""
    return t.to(torch.get_autocast_dtype(t.device.type)) if is_autocast(t) else t
