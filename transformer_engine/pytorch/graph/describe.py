"""Formats values for error messages: a tensor by dtype, shape, strides and device, other values by a short repr.

- Nothing here raises.
- A repr has a bounded length.
"""

import reprlib
import sys

import torch

OP = "make_graphed_callables"
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # other classes may hold their values in other tensors


def describe_tensor(t: torch.Tensor) -> str:
    grad = ", requires_grad" if t.requires_grad else ""
    if t.is_nested or t.layout is not torch.strided:
        return f"a {'nested' if t.is_nested else str(t.layout).removeprefix('torch.')} tensor of {t.dtype}{grad}"
    return f"{t.dtype} {list(t.shape)} with strides {list(t.stride())} on {t.device}{grad}"


def callable_name(module: object, index: int) -> str:
    named = type(module) if isinstance(module, torch.nn.Module) else module
    return f"callable {index} ({getattr(named, '__name__', type(module).__name__)})"


def is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")  # not imported here: if numpy is not loaded, no value can come from it
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlist = self.maxtuple = 16

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"a tensor, {describe_tensor(x)}"
        if is_numpy(x) and x.size > 16:
            return f"an array of {x.dtype} {list(x.shape)}"
        return super().repr1(x, level)


short_repr = _Repr().repr
