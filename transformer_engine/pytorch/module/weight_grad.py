"""Where a module's weight gradients go: returned, accumulated into main_grad, or stored until backward_dw(). The
products are the gemm room's; nothing here computes one."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch import functional as F


@functools.cache
def _dummy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False, device=None) -> torch.Tensor:
    """A gradient that stands for one already in main_grad, so that autograd's hooks fire. One buffer a shape, shared by
    all: a fresh alias of it each time, else autograd would copy it. Its values mean nothing, unless `zero`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    dummy = _dummy(tuple(shape), dtype, device)
    return dummy.zero_().detach() if zero else dummy.detach()


class WeightGradStore:
    """First in, first out: the weight gradients that a backward left to backward_dw(). Copies of it are empty."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        if delay_wgrad_compute and ub_bulk_wgrad:
            raise ValueError(
                "WeightGradStore: arguments 'delay_wgrad_compute' and 'ub_bulk_wgrad' are both True; a gradient whose "
                "communication is overlapped with its product cannot wait. Leave one of them at False."
            )
        self.enabled = delay_wgrad_compute
        self._left: queue.Queue[Callable[[], None]] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, compute: Callable[[], None]) -> None:
        self._left.put(compute)

    def check(self, op: str, parameter: str) -> None:
        """RuntimeError where there is nothing to pop: a backward comes first."""
        if self._left.empty():
            raise RuntimeError(
                f"{op}: backward_dw() was called, but no weight gradient of '{parameter}' is left to compute; call it "
                "once after each backward() of a step that wanted that gradient."
            )

    def pop(self) -> None:
        """Computes the oldest gradient; queue.Empty where there is none."""
        self._left.get_nowait()()

    def __reduce__(self):
        return WeightGradStore, (self.enabled,)

    def __deepcopy__(self, memo) -> WeightGradStore:
        return WeightGradStore(self.enabled)


def _check_main_grad(op: str, name: str, weight: torch.Tensor, main_grad: object) -> None:
    if not isinstance(main_grad, torch.Tensor):
        raise ValueError(
            f"{op}: argument 'fuse_wgrad_accumulation' is True, but parameter '{name}' has main_grad {main_grad!r}; "
            f"give it a tensor, {name}.main_grad = torch.zeros({list(weight.shape)}, dtype=torch.float32), or a "
            "get_main_grad() that returns one."
        )
    fits = main_grad.shape == weight.shape and main_grad.device == weight.device and main_grad.is_contiguous()
    if not fits or main_grad.dtype not in (torch.float32, weight.dtype):
        raise ValueError(
            f"{op}: main_grad of parameter '{name}' is {main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
            f"{'' if main_grad.is_contiguous() else ', not contiguous'}, wanted a contiguous torch.float32 (or "
            f"{weight.dtype}) {list(weight.shape)} on {weight.device}."
        )


def _main_grad(op: str, name: str, weight: torch.Tensor) -> torch.Tensor:
    found = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
    _check_main_grad(op, name, weight, found)
    return found


def _accumulate_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does at a leaf."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class WeightGradSink:
    """One call's answer to "where does the gradient of this weight go": the extension calls it in backward with dy and
    the product's operand. weights and biases are the rows of one matrix, in order."""

    def __init__(
        self,
        op: str,
        names: Sequence[str],
        weights: Sequence[torch.nn.Parameter],
        biases: Sequence[torch.nn.Parameter],
        *,
        fused: bool,
        overwrite: bool,
        store: WeightGradStore | None,
    ) -> None:
        self.op, self.names, self.weights, self.biases = op, names, weights, biases
        self.fused, self.overwrite, self.store = fused, overwrite, store
        if fused:  # what can be known to be wrong is said before anything has run
            for name, weight in zip(names, weights, strict=True):
                if not hasattr(weight, "get_main_grad"):
                    _main_grad(op, name, weight)

    def __call__(
        self, dy: torch.Tensor, operand: torch.Tensor, with_bias: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.store is not None:
            self.store.put(functools.partial(self._later, dy, operand, with_bias))
            return None, None
        dbias = self._accumulate(dy, operand, with_bias)
        return self._stand_in(dy.dtype), dbias

    @torch.no_grad()
    def _later(self, dy: torch.Tensor, operand: torch.Tensor, with_bias: bool) -> None:
        if self.fused:
            dbias = self._accumulate(dy, operand, with_bias)
            for weight in self.weights:
                if weight.grad is None and hasattr(weight, "grad_added_to_main_grad"):
                    zero = getattr(weight, "zero_out_wgrad", False)
                    weight.grad = get_dummy_wgrad(weight.shape, weight.dtype, zero, weight.device)
        else:
            dweight, dbias = F.linear_wgrad(dy, operand, with_bias)
            for weight, part in zip(self.weights, dweight.split(self._rows()), strict=True):
                _accumulate_grad(weight, part)
        if with_bias:
            for bias, part in zip(self.biases, dbias.split(self._rows()), strict=True):
                _accumulate_grad(bias, part)

    def _rows(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    def _accumulate(self, dy: torch.Tensor, operand: torch.Tensor, with_bias: bool) -> torch.Tensor | None:
        """main_grad of each weight; returns the bias's gradient."""
        sums = []
        for name, weight, part in zip(self.names, self.weights, dy.split(self._rows(), dim=-1), strict=True):
            overwrite = self.overwrite or getattr(weight, "overwrite_main_grad", False)
            main_grad = _main_grad(self.op, name, weight)
            sums.append(
                F.gemm_accumulate(operand, part, "NT", main_grad, bias_grad=with_bias, overwrite=bool(overwrite))
            )
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
        if not with_bias:
            return None
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _stand_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets for a gradient that is in main_grad already: nothing, or where the owner of main_grad
        waits for autograd's hooks (it set grad_added_to_main_grad) a dummy."""
        if not all(hasattr(weight, "grad_added_to_main_grad") for weight in self.weights):
            return None
        zero = any(getattr(weight, "zero_out_wgrad", False) for weight in self.weights)
        shape = (sum(self._rows()), *self.weights[0].shape[1:])
        return get_dummy_wgrad(shape, dtype, zero, self.weights[0].device)
