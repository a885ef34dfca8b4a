"""Where a module's weight gradients go: returned, accumulated into main_grad, or stored until backward_dw(). The
products are the gemm room's; nothing here computes one."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.utils import resolve_device


@functools.cache
def _dummy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False, device=None) -> torch.Tensor:
    """A gradient that stands for one already in main_grad, so that autograd's hooks fire. One buffer a shape, shared by
    all: a fresh alias of it each time, else autograd would copy it. Its values mean nothing, unless `zero`."""
    device = resolve_device(device)
    with torch.inference_mode(False):  # a buffer made there would be an inference tensor for good
        dummy = _dummy(tuple(shape), dtype, device)
    return dummy.zero_().detach() if zero else dummy.detach()


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
    if torch.compiler.is_compiling():  # which is refused later, by name
        return
    if main_grad.untyped_storage().nbytes() == 0 and main_grad.numel():
        raise ValueError(
            f"{op}: main_grad of parameter '{name}' is {list(main_grad.shape)}, but its memory has been freed; "
            "allocate it again before the backward that adds to it."
        )


# Additions to one main_grad from several threads take turns. Striped, so that no parameter carries a lock.
_LOCKS = [threading.Lock() for _ in range(64)]


def _lock_of(main_grad: torch.Tensor) -> threading.Lock:
    return _LOCKS[main_grad.data_ptr() // 256 % len(_LOCKS)]


_listening: list[set[int]] = []


@contextmanager
def accumulation_noted() -> Iterator[set[int]]:
    """Gets the weights, by id, whose gradients are added to main_grad inside, on whichever thread."""
    noted: set[int] = set()
    _listening.append(noted)
    try:
        yield noted
    finally:
        _listening[:] = [other for other in _listening if other is not noted]


def _accumulate_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does at a leaf; a frozen one gets nothing."""
    if not parameter.requires_grad:
        return
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


@dataclass(frozen=True)
class Product:
    """A call's product, as its weight gradients need it: weights and biases are the rows of one matrix, in order; those
    that wanted no gradient when it was called get none."""

    op: str
    names: Sequence[str]
    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor]
    wanted: Sequence[bool]  # of the weights
    fused: bool
    overwrite: bool
    unasked: frozenset[int] = frozenset()  # by id: whose gradients the backward was not asked for

    def asked_for(self) -> Product:
        """In a backward: without the weights and biases whose gradients it does not bring (torch.autograd.grad(),
        backward(inputs=)). For autograd those of several parameters are one matrix, of which all is wanted or none."""
        if len(self.weights) == 1:
            return self
        tensors = [*self.weights, *self.biases]
        unwanted = _C.unwanted(tensors)
        return replace(self, unasked=frozenset(id(tensors[i]) for i in unwanted)) if unwanted else self

    @property
    def rows(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    def main_grads(self, *, ask: bool = True) -> list[torch.Tensor | None]:
        """Where the wanted gradients are added to. Unless `ask`, a get_main_grad() is left to the backward.
        ValueError for a missing or unfit one."""
        found = []
        for name, weight, wanted in zip(self.names, self.weights, self.wanted, strict=True):
            lazy = hasattr(weight, "get_main_grad")
            found.append(None)
            if wanted and (ask or not lazy) and id(weight) not in self.unasked:
                found[-1] = weight.get_main_grad() if lazy else getattr(weight, "main_grad", None)
                _check_main_grad(self.op, name, weight, found[-1])
        return found

    def accumulate(
        self, work: _C.WeightProduct, with_bias: bool, main_grads: Sequence[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The wanted gradients into main_grads; returns the bias's."""
        sums, first = [], 0
        for weight, main_grad in zip(self.weights, main_grads, strict=True):
            rows = weight.shape[0]
            if main_grad is None:
                sums += [work.column_sums(first, rows)] if with_bias else []
            else:
                overwrite = self.overwrite or bool(getattr(weight, "overwrite_main_grad", False))
                with _lock_of(main_grad):
                    sums.append(work.accumulate(main_grad, first, rows, with_bias, overwrite))
                for noted in _listening:
                    noted.add(id(weight))
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
            first += rows
        if not with_bias:
            return None
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def stand_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What autograd gets for gradients that are in main_grad already: nothing, or where the owner of main_grad
        waits for autograd's hooks (it set grad_added_to_main_grad) a dummy."""
        wanted = [weight for weight, wanted in zip(self.weights, self.wanted, strict=True) if wanted]
        if not all(hasattr(weight, "grad_added_to_main_grad") for weight in wanted):
            return None
        zero = any(getattr(weight, "zero_out_wgrad", False) for weight in wanted)
        shape = (sum(self.rows), *self.weights[0].shape[1:])
        return get_dummy_wgrad(shape, dtype, zero, self.weights[0].device)


@dataclass(frozen=True)
class Pending:
    """A weight gradient that backward() left: what it is made of, and the versions that these tensors had."""

    product: Product
    work: _C.WeightProduct
    with_bias: bool
    reads: Sequence[torch.Tensor]  # the caller's tensors among the operands: the FP8 ones are nobody else's
    versions: Sequence[int]

    def check(self, current: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The main_grads. Raises where the gradient cannot be computed any more, or has nowhere to go; `current` are
        the module's weights now."""
        product, name = self.product, self.product.names[0]
        if any(own is not seen for own, seen in zip(current, product.weights, strict=True)):
            raise RuntimeError(
                f"{product.op}: backward_dw() was called, but '{name}' is not the parameter that backward() saw "
                "(FSDP2 puts its shards back after a backward): a delayed gradient cannot reach it. Build the module "
                "without delay_wgrad_compute there."
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
        unasked = product.unasked
        if product.fused:
            dbias = product.accumulate(self.work, self.with_bias, main_grads)
            for weight, main_grad in zip(product.weights, main_grads, strict=True):
                if main_grad is not None and weight.grad is None and hasattr(weight, "grad_added_to_main_grad"):
                    zero = getattr(weight, "zero_out_wgrad", False)
                    weight.grad = get_dummy_wgrad(weight.shape, weight.dtype, zero, weight.device)
        else:
            dweight, dbias = self.work.compute(self.with_bias)
            for weight, part in zip(product.weights, dweight.split(product.rows), strict=True):
                if id(weight) not in unasked:
                    _accumulate_grad(weight, part)
        if self.with_bias:
            for bias, part in zip(product.biases, dbias.split(product.rows), strict=True):
                if id(bias) not in unasked:
                    _accumulate_grad(bias, part)


class WeightGradStore:
    """First in, first out: the weight gradients that a backward left to backward_dw(). Copies of it are empty."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        if delay_wgrad_compute and ub_bulk_wgrad:
            raise ValueError(
                "WeightGradStore: arguments 'delay_wgrad_compute' and 'ub_bulk_wgrad' are both True; a gradient whose "
                "communication is overlapped with its product cannot wait. Leave one of them at False."
            )
        self.enabled = delay_wgrad_compute
        self._left: collections.deque[Pending] = collections.deque()  # its ends are safe to use from several threads

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


class WeightGradSink:
    """One call's answer to "where does the gradient of this weight go": the extension calls it in backward with the
    product that gives it."""

    def __init__(self, product: Product, store: WeightGradStore | None) -> None:
        self.product, self.store = product, store
        if product.fused:  # what can be known to be wrong is said before anything has run
            product.main_grads(ask=False)

    def __call__(self, work: _C.WeightProduct, with_bias: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        product = self.product.asked_for()
        if self.store is not None:
            reads = work.reads
            self.store.put(Pending(product, work, with_bias, reads, [tensor._version for tensor in reads]))
            return None, None
        main_grads = product.main_grads()
        dbias = product.accumulate(work, with_bias, main_grads)
        return product.stand_in(work.dtype), dbias
