"""The Python part of weight gradients that a backward does not return: errors for an unfit main_grad, and the store of
gradients that wait for backward_dw(). The extension runs the backward (csrc/wgrad/main_grad.h); nothing is computed
here."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import refuse
from transformer_engine.pytorch.functional.linear import TracedGradAccumulator
from transformer_engine.pytorch.utils import resolve_device


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False, device=None) -> torch.Tensor:
    """A placeholder for a gradient that is already in main_grad, so that autograd's hooks run. One buffer for each
    shape: each call returns a new alias of it, because autograd would copy it otherwise. Its values are undefined
    unless `zero` is set."""
    return _C.dummy_weight_grad(list(shape), dtype, resolve_device(device), zero)


class DummyGradients(Mapping):
    """The buffers of get_dummy_wgrad: (*shape, dtype) -> the buffer, on one of its devices; clear() frees buffers
    without other references."""

    def _all(self) -> dict[tuple, torch.Tensor]:
        return {(*buffer.shape, buffer.dtype): buffer for buffer in _C.dummy_weight_grads()}

    def __getitem__(self, key: tuple) -> torch.Tensor:
        return self._all()[key]

    def __iter__(self) -> Iterator[tuple]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def clear(self) -> None:
        _C.clear_dummy_weight_grads()


_dummy_wgrads = DummyGradients()


def _misfit(op: str, name: str, weight: torch.Tensor, main_grad: object) -> str | None:
    """The error text for a main_grad that does not fit, or None."""
    if not isinstance(main_grad, torch.Tensor):
        return (
            f"{op}: argument 'fuse_wgrad_accumulation' is True, but parameter '{name}' has main_grad {main_grad!r}; "
            f"give it a tensor, {name}.main_grad = torch.zeros({list(weight.shape)}, dtype=torch.float32), or a "
            "get_main_grad() that returns one."
        )
    fits = main_grad.shape == weight.shape and main_grad.device == weight.device and main_grad.is_contiguous()
    if not fits or main_grad.dtype not in (torch.float32, weight.dtype):
        dtypes = "torch.float32" if weight.dtype is torch.float32 else f"torch.float32 (or {weight.dtype})"
        return (
            f"{op}: main_grad of parameter '{name}' is {main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
            f"{'' if main_grad.is_contiguous() else ', not contiguous'}, wanted a contiguous {dtypes} "
            f"{list(weight.shape)} on {weight.device}."
        )
    return None


def _check_main_grad(op: str, name: str, weight: torch.Tensor, main_grad: object) -> None:
    words = _misfit(op, name, weight, main_grad)
    if words is not None:
        raise ValueError(words)
    if main_grad.untyped_storage().nbytes() == 0 and main_grad.numel():
        raise ValueError(
            f"{op}: main_grad of parameter '{name}' is {list(main_grad.shape)}, but its memory has been freed; "
            "allocate it again before the backward that adds to it."
        )


def traced_grad_accumulator(
    op: str, weights: dict[str, torch.Tensor], is_first_microbatch: object
) -> TracedGradAccumulator:
    """The main_grads of a product's weights for torch.compile: the forward reads them, because a compiled backward
    cannot."""
    if is_first_microbatch not in (None, True, False):
        refuse(f"{op}: argument 'is_first_microbatch' is {is_first_microbatch!r}, wanted True, False or None.")
    main_grads: list[torch.Tensor] = []
    targets: list[tuple[int, int]] = []
    for name, weight in weights.items():
        if not weight.requires_grad:
            targets.append((weight.shape[0], -1))
            continue
        if hasattr(weight, "grad_added_to_main_grad"):
            refuse(
                f"{op}: parameter '{name}' has grad_added_to_main_grad, which a compiled backward cannot set; delete "
                "it, or keep the module out of the compiled region."
            )
        get_main_grad = getattr(weight, "get_main_grad", None)
        main_grad = getattr(weight, "main_grad", None) if get_main_grad is None else get_main_grad()
        words = _misfit(op, name, weight, main_grad)
        if words is not None:
            refuse(words)
        main_grads.append(main_grad)
        targets.append(
            (weight.shape[0], int(bool(is_first_microbatch) or bool(getattr(weight, "overwrite_main_grad", False))))
        )
    return TracedGradAccumulator(main_grads, targets)


@contextmanager
def accumulation_noted() -> Iterator[set[int]]:
    """Collects the ids of the weights whose gradients are added to main_grad inside, on any thread."""
    noted: set[int] = set()
    _C.note_accumulations(noted)
    try:
        yield noted
    finally:
        _C.forget_accumulations(noted)


def _accumulate_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does at a leaf; a frozen leaf gets no gradient."""
    if not parameter.requires_grad:
        return
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


@dataclass(frozen=True)
class Pending:
    """A weight gradient that backward() left: its operands, and the versions that they had."""

    product: _C.WeightParameters
    work: _C.WgradTask
    with_bias: bool
    reads: Sequence[torch.Tensor]  # operands that belong to the caller; FP8 operands have no other user
    versions: Sequence[int]

    def check(self, current: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The main_grads. Raises if the gradient cannot be computed any more, or has no destination; `current`: the
        module's present weights."""
        product, name = self.product, self.product.names[0]
        others = [i for i, (own, seen) in enumerate(zip(current, product.weights, strict=True)) if own is not seen]
        if others:
            name = product.names[others[0]]
            raise RuntimeError(
                f"{product.op}: backward_dw() was called, but '{name}' is not the parameter that backward() saw "
                "(FSDP2 puts its shards back after a backward): a delayed gradient cannot reach it. Build the module "
                "without delay_wgrad_compute."
            )
        if [tensor._version for tensor in self.reads] != self.versions:
            raise RuntimeError(
                f"{product.op}: backward_dw() was called, but the gradient or the input of the product with '{name}' "
                "was changed in place since backward(); leave both alone until backward_dw(), or give the module a "
                "copy. drop_backward_dw() gives the gradient up."
            )
        return product.main_grads() if product.fused else []

    @torch.no_grad()
    def compute(self, main_grads: Sequence[torch.Tensor | None]) -> None:
        product = self.product
        left_out, weights = set(product.left_out), product.weights
        if product.fused:
            dbiases = product.accumulate(self.work, main_grads, self.with_bias)
            for weight, main_grad in zip(weights, main_grads, strict=True):
                if main_grad is not None and weight.grad is None and hasattr(weight, "grad_added_to_main_grad"):
                    zero = getattr(weight, "zero_out_wgrad", False)
                    weight.grad = get_dummy_wgrad(weight.shape, weight.dtype, zero, weight.device)
        else:
            dweights, dbiases = product.compute(self.work, self.with_bias)
            for number, (weight, part) in enumerate(zip(weights, dweights, strict=True)):
                if number not in left_out:
                    _accumulate_grad(weight, part)
        if self.with_bias:
            for number, (bias, part) in enumerate(zip(product.biases, dbiases, strict=True), len(weights)):
                if number not in left_out:
                    _accumulate_grad(bias, part)


class WeightGradStore:
    """First in, first out: the weight gradients that a backward left for backward_dw(). Copies of a store are empty."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        if delay_wgrad_compute and ub_bulk_wgrad:
            raise ValueError(
                "WeightGradStore: arguments 'delay_wgrad_compute' and 'ub_bulk_wgrad' are both True; a gradient whose "
                "communication is overlapped with its product cannot wait. Leave one of them at False."
            )
        self.enabled = delay_wgrad_compute
        self._left: collections.deque[Pending] = collections.deque()  # several threads may use its ends

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, pending: Pending) -> None:
        self._left.append(pending)

    def oldest(self) -> Pending | None:
        return self._left[0] if self._left else None

    def pop(self) -> Pending:
        return self._left.popleft()

    def clear(self) -> None:
        self._left.clear()

    def __reduce__(self):
        return WeightGradStore, (self.enabled,)

    def __deepcopy__(self, memo) -> WeightGradStore:
        return WeightGradStore(self.enabled)


def _refuse_computed(op: str, name: str) -> None:
    raise ValueError(
        f"{op}: '{name}' is computed from other tensors (a parametrization, weight_norm), and only autograd brings a "
        "gradient back to them; build the module without fuse_wgrad_accumulation and delay_wgrad_compute."
    )


def _is_first_microbatch(op: str, value: object) -> bool:
    if isinstance(value, torch.Tensor) or value not in (None, True, False):
        raise ValueError(f"{op}: argument 'is_first_microbatch' is {value!r}, wanted True, False or None.")
    return bool(value)


def _leave(store: WeightGradStore, product: _C.WeightParameters, work: _C.WgradTask, with_bias: bool) -> None:
    reads = work.reads
    store.put(Pending(product, work, with_bias, reads, [tensor._version for tensor in reads]))


_C.answer_weight_grads(
    check_main_grad=_check_main_grad,
    refuse_computed=_refuse_computed,
    is_first_microbatch=_is_first_microbatch,
    leave=_leave,
)
