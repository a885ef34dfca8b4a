"""The numbers of floating-point operations of torch.ops.te's products, for torch's FlopCounterMode, which sees them
below autograd, also in eager mode. Nothing is counted here. torch's counter imports Triton, so the numbers are
registered when other code imports it."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

import torch

_COUNTER = "torch.utils.flop_counter"
_Shape = Sequence[int]


def _rows(shape: _Shape) -> int:
    return math.prod(shape[:-1])


def _gemm(a: _Shape, b: _Shape, layout: str, *_, **__) -> int:
    if layout == "NT":
        return 2 * math.prod(a) * b[-1]
    return 2 * _rows(b) * math.prod(a)


def _linear_fwd(x: _Shape, weight: _Shape, *_, **__) -> int:
    return 2 * _rows(x) * math.prod(weight)


def _wgrad(dy: _Shape, x: _Shape, *_, **__) -> int:
    return 2 * math.prod(dy) * x[-1]


def _gemm_fp8(a: _Shape, *_, out_shape: _Shape, **__) -> int:
    """The product sums over the dimension of a's data that is not out's columns, in either direction of the
    operands."""
    return 2 * _rows(out_shape) * math.prod(a)


def _gemm_fp8_accumulate(a: _Shape, _a, __a, b: _Shape, _b, __b, out: _Shape, *_, **__) -> int:
    return 2 * _rows(out) * math.prod(a)


def _grouped_rows(x: _Shape, *_, out_shape: _Shape, **__) -> int:
    return 2 * math.prod(x) * out_shape[-1]


def _grouped_fp8_wgrad(dy: _Shape, _dy, __dy, x: _Shape, *_, **__) -> int:
    """For panels, whose columns are the rows that the product sums over."""
    return 2 * math.prod(dy) * x[0]


def _linear_cross_entropy(hidden: _Shape, weight: _Shape, *rest: object, **options: object) -> int:
    wanted = options.get("wanted", rest[-1] if rest else (False, False))
    return 2 * _rows(hidden) * math.prod(weight) * (1 + sum(map(bool, wanted[:2])))


_FORMULAS = {
    "gemm": _gemm,
    "gemm_accumulate": _gemm,
    "gemm_fp8": _gemm_fp8,
    "gemm_fp8_accumulate": _gemm_fp8_accumulate,
    "grouped_dgrad": _grouped_rows,
    "grouped_fp8_dgrad": _grouped_rows,
    "grouped_fp8_fprop": _grouped_rows,
    "grouped_fp8_wgrad": _grouped_fp8_wgrad,
    "grouped_fp8_wgrad_accumulate": _grouped_fp8_wgrad,
    "grouped_fprop": _grouped_rows,
    "grouped_wgrad": _wgrad,
    "grouped_wgrad_accumulate": _wgrad,
    "linear_cross_entropy_fwd": _linear_cross_entropy,
    "linear_dgrad": _linear_fwd,
    "linear_fwd": _linear_fwd,
    "linear_wgrad": _wgrad,
}


def _register() -> None:
    register = sys.modules[_COUNTER].register_flop_formula
    for name, formula in _FORMULAS.items():
        register(getattr(torch.ops.te, name))(formula)


class _AtItsImport(MetaPathFinder):
    """Finds the counter by the other finders, and registers after its import; once."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module

            def load_and_register(module: object) -> None:
                load(module)
                _register()

            spec.loader.exec_module = load_and_register
        return spec


if _COUNTER in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AtItsImport())
