"""Gradients that are sums over one rank's own tokens, added up over the group that divides the tokens: for users
without a framework that does it. Nothing is divided, clipped or overlapped here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch._internal.torch_private import debug_has_internal_overlap
from transformer_engine.pytorch.distributed.dtensor import as_lies, local_grad, local_of, marks_of
from transformer_engine.pytorch.distributed.groups import (
    calls_of_ranks,
    check_device,
    enqueue_guard,
    post_fingerprint,
    ranks_of,
)

_OP = "allreduce_sequence_parallel_grads"
_BUCKET = 1 << 23  # the most elements in one collective, except those of one parameter


class _Gradient(NamedTuple):
    """One parameter's contribution: the tensor with its gradient (None: it has none), and its shape."""

    name: str
    parameter: torch.Tensor
    found: torch.Tensor | None
    like: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum: rounded once, after the sum. Independent of the gradient, so that ranks agree."""
        return torch.promote_types(self.parameter.dtype, torch.float32)


@torch.no_grad()
def allreduce_sequence_parallel_grads(module: torch.nn.Module, group: object | None = None) -> None:
    """Adds up, over the group, the gradients of the module's parameters that are marked `sequence_parallel=True`: those
    of norms and of a row layer's bias, of which each rank has the sum over its own tokens. Call it once a step, after
    the last backward and before gradients are clipped.

    A parameter's gradient is its .grad, unless that is a dummy (`grad_added_to_main_grad` is True) or None: then it is
    its main_grad, if it has one. It is written in place, of a DTensor the local part. A parameter with several names
    counts once; a rank without a gradient adds nothing, and gets the others' sum. The parameters are joined in the
    module's order, in float32 at least, so that a call needs few collectives and gives the same bits each time. Frozen
    parameters have no gradient, and a group of 1 communicates nothing. Parameters that FSDP2 shards have lost their
    marks: those that this library's modules declare are restored, others must be set again.

    Errors: TypeError unless `module` is a module; ValueError, and nothing is changed, for a gradient that is sparse, or
    on a device that the group has no backend for; if the group has gloo for the CPU, the same ValueError on every rank
    if the ranks have different parameters.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{_OP}: argument 'module' is a {type(module).__name__}, wanted a torch.nn.Module.")
    if ranks_of(_OP, "group", group) == 1:
        return
    gradients = [_gradient(name, parameter) for name, parameter in _marked(module)]
    for gradient in gradients:
        check_device(_OP, f"module ({gradient.name})", gradient.like, group)
    _check_agreement(gradients, group)
    buckets = list(_buckets(gradients))
    flats = [_packed(bucket) for bucket in buckets]
    works = []
    for flat in flats:
        with enqueue_guard(group, flat.device):
            works.append(dist.all_reduce(flat, group=group, async_op=True))
    for work in works:
        work.wait()
    for bucket, flat in zip(buckets, flats, strict=True):
        _unpack(bucket, flat)


def _marked(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, p in owner._parameters.items():
            if p is None or id(p) in seen or not p.requires_grad:
                continue
            if marks_of(owner, name).get("sequence_parallel", False) is True:
                seen.add(id(p))
                yield f"{prefix}.{name}" if prefix else name, p


def _gradient(name: str, parameter: torch.Tensor) -> _Gradient:
    grad = parameter.grad
    if getattr(parameter, "grad_added_to_main_grad", False) is True or grad is None:
        get = getattr(parameter, "get_main_grad", None)
        grad = getattr(parameter, "main_grad", None) if get is None else get()
    like, found = local_of(parameter), local_grad(grad, parameter)
    if found is not None and (found.layout is not torch.strided or found.shape != like.shape):
        raise ValueError(
            f"{_OP}: the gradient of parameter '{name}' is {found.layout} {list(found.shape)}, wanted a dense one of "
            f"{list(like.shape)}."
        )
    return _Gradient(name, parameter, found, like if found is None else found)


def _check_agreement(gradients: list[_Gradient], group: object | None) -> None:
    sizes = [len(gradients), sum(g.like.numel() for g in gradients)]
    described = "".join(f"{g.name}{tuple(g.like.shape)}{g.dtype}{g.like.device.type}" for g in gradients)
    every = calls_of_ranks(_OP, described, torch.float32, sizes, group)
    if not every:  # the group cannot compare
        device = gradients[0].like.device if gradients else torch.device("cuda")  # like ranks that have some
        post_fingerprint(_OP, described, torch.float32, sizes, device, group)
    if any(call != every[0] for call in every):
        counts = "; ".join(f"rank {rank} {' of '.join(map(str, s.sizes))} elements" for rank, s in enumerate(every))
        raise ValueError(
            f"{_OP}: argument 'module' has other parameters marked sequence_parallel on other ranks of the group: "
            f"{counts}; wanted the same names, shapes and dtypes, frozen or not, on each of them."
        )


def _buckets(gradients: list[_Gradient]) -> Iterator[list[_Gradient]]:
    """The gradients in the module's order, those of one device and dtype together."""
    by_kind: dict[tuple, list[_Gradient]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.like.device, gradient.dtype), []).append(gradient)
    for kind in by_kind.values():
        bucket: list[_Gradient] = []
        for gradient in kind:
            if bucket and sum(g.like.numel() for g in bucket) + gradient.like.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket


def _packed(bucket: list[_Gradient]) -> torch.Tensor:
    """The gradients, zeros if there are none, followed by the number of each."""
    device, dtype = bucket[0].like.device, bucket[0].dtype
    parts = [
        torch.zeros(g.like.numel(), device=device, dtype=dtype) if g.found is None else g.found.reshape(-1).to(dtype)
        for g in bucket
    ]
    counts = torch.tensor([float(g.found is not None) for g in bucket], dtype=dtype)
    return torch.cat([*parts, counts.to(device, non_blocking=True)])


def _unpack(bucket: list[_Gradient], flat: torch.Tensor) -> None:
    *sums, counts = flat.split([*(g.like.numel() for g in bucket), len(bucket)])
    found = [(g, total) for g, total in zip(bucket, sums, strict=True) if g.found is not None]
    for g, total in found:
        if g.found is g.parameter.grad and debug_has_internal_overlap(g.found) == 1:  # an expanded tensor
            g.parameter.grad = total.view(g.found.shape).to(g.found.dtype, copy=True)
        else:
            g.found.copy_(total.view(g.found.shape))
    if len(found) == len(bucket):
        return
    for g, total, others in zip(bucket, sums, counts.tolist(), strict=True):
        if g.found is None and others:
            g.parameter.grad = as_lies(g.parameter, total.view(g.like.shape).to(g.parameter.dtype, copy=True))
