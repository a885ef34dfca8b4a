"""Gathers of quantized tensors along the first dimension: bytes and scales are sent, and become the quantized tensor of
the joined values. Quantizers quantize values, never this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from transformer_engine.pytorch.distributed.groups import check_agreement, check_device
from transformer_engine.pytorch.distributed.work import Work
from transformer_engine.pytorch.functional.comm import comm_interleave
from transformer_engine.pytorch.tensor import engine, layout
from transformer_engine.pytorch.tensor.float8 import Float8CurrentScalingQuantizer, Float8TensorStorage
from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockQuantizer, Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.float8_delayed import Float8Quantizer
from transformer_engine.pytorch.tensor.layout import BLOCK, COLUMNWISE, ROWWISE
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import FLOATS
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_TRAVELLING = (Float8Quantizer, Float8CurrentScalingQuantizer, Float8BlockQuantizer)


class _Gather(NamedTuple):
    """One call: its name, its ranks, and the directions of the result."""

    op: str
    group: Any
    ranks: int
    rowwise: bool
    columnwise: bool


@torch.no_grad()
def gather_quantized(
    op: str, inp: torch.Tensor | QuantizedTensorStorage, group: Any, ranks: int, quantizer: Quantizer | None
) -> tuple[QuantizedTensorStorage, Work]:
    """Every rank's inp as one quantized tensor, and the work to wait for before it is read."""
    if quantizer is not None:
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"{op}: argument 'quantizer' is {quantizer!r}, wanted a Quantizer or None.")
        quantizer._must_want_something()
    quantized = isinstance(inp, QuantizedTensorStorage)
    usages = inp.get_usages() if quantizer is None else {k: getattr(quantizer, f"{k}_usage") for k in layout.DATA}
    call = _Gather(op, group, ranks, usages[ROWWISE], usages[COLUMNWISE])
    if quantized:
        _check_format(call, inp, quantizer)
    elif inp.dtype not in FLOATS:
        raise ValueError(f"{op}: argument 'inp' is {inp.dtype}, wanted float32, float16 or bfloat16 to quantize.")
    if len(inp.shape) == 0:
        raise ValueError(f"{op}: argument 'inp' has no dimensions, wanted at least one.")
    if ranks == 1:
        return (_with_usages(call, inp, quantizer) if quantized else quantizer(inp.detach())), Work()
    check_device(op, "inp", inp, group)
    check_agreement(op, inp, group, details=f"{type(inp).__name__ if quantized else ''}{quantizer!r}{usages}")
    if quantized:
        return _gathered(call, _shard_of(call, inp), inp, quantizer)
    if not isinstance(quantizer, _TRAVELLING) or quantizer._python_written or not _splits(quantizer, inp.shape, call):
        return quantizer(_values_of_all(inp.detach(), call)), Work()
    return _gathered(call, _quantized_shard(call, inp.detach(), quantizer), inp, quantizer)


def _check_format(call: _Gather, inp: QuantizedTensorStorage, quantizer: Quantizer | None) -> None:
    if not isinstance(inp, (Float8TensorStorage, Float8BlockwiseQTensorStorage)):
        raise NotImplementedError(
            f"{call.op}: argument 'inp' is a {type(inp).__name__}, but gathering tensors of that format is not "
            "available in this version; dequantize() it first."
        )
    inp._must_hold_data(call.op)
    if quantizer is not None and not quantizer._makes_the_same(None, inp):
        raise ValueError(
            f"{call.op}: argument 'inp' is a {type(inp).__name__} that 'quantizer', {quantizer!r}, does not make; "
            "dequantize() it first, or leave out the quantizer."
        )
    if isinstance(inp, Float8BlockwiseQTensorStorage):
        lacking = [k for k, present in inp.get_usages().items() if getattr(call, k) and not present]
        if lacking and not inp._is_2D_scaled:
            raise ValueError(
                f"{call.op}: argument 'inp' has no {lacking[0]} data, which 'quantizer' requests; 1 x 128 blocks of "
                "one direction cannot be derived from the other: quantize in both (set_usage)."
            )
        if call.ranks > 1 and not _splits(inp, inp.shape, call):
            raise ValueError(
                f"{call.op}: argument 'inp' has {layout.fold(inp.shape)[0]} rows in blocks of {BLOCK}, wanted a "
                f"multiple of {BLOCK}: a block of the joined tensor spans two ranks. Gather the values with the "
                "quantizer."
            )


def _splits(blocks: Any, shape: torch.Size, call: _Gather) -> bool:
    """Whether each block of the joined tensor belongs to one rank. blocks: a quantizer, or its result."""
    if isinstance(blocks, (Float8BlockQuantizer, Float8BlockwiseQTensorStorage)):
        divides = len(shape) > 1 and layout.fold(shape)[0] % BLOCK == 0
        return divides or (len(shape) > 1 and not _is_2d(blocks) and not call.columnwise)
    return True


def _is_2d(blocks: Any) -> bool:
    return blocks._is_2D_scaled if isinstance(blocks, Float8BlockwiseQTensorStorage) else blocks.block_scaling_dim == 2


def _with_usages(call: _Gather, inp: QuantizedTensorStorage, quantizer: Quantizer | None) -> QuantizedTensorStorage:
    if quantizer is None or inp.get_usages() == {ROWWISE: call.rowwise, COLUMNWISE: call.columnwise}:
        return inp
    result = quantizer._from_parts(inp._tensors(), inp.shape, inp.dtype)
    result.update_usage(call.rowwise, call.columnwise)
    return result


def _values_of_all(inp: torch.Tensor, call: _Gather) -> torch.Tensor:
    out = inp.new_empty((call.ranks * inp.shape[0], *inp.shape[1:]))
    dist.all_gather_into_tensor(out, inp.contiguous(), group=call.group)
    return out


# ---- one rank's part ----


def _quantized_shard(call: _Gather, inp: torch.Tensor, quantizer: Quantizer) -> QuantizedTensorStorage:
    """inp by the scales of the joined tensor, in the directions that are sent."""
    own = quantizer.copy()
    own.internal = True
    if quantizer.supports_only_rowwise_all_gather() or _is_2d(quantizer):
        own.set_usage(rowwise=True, columnwise=False)
    if isinstance(own, Float8CurrentScalingQuantizer):
        _agree_on_amax(call, inp, own)
        if not quantizer.use_existing_amax:
            quantizer._take_note_of(own.amax)
    shard = own(inp)
    if isinstance(own, Float8Quantizer) and inp.device.type == "cpu":
        _check_scales(call, shard)
    return shard


def _agree_on_amax(call: _Gather, inp: torch.Tensor, quantizer: Float8CurrentScalingQuantizer) -> None:
    amax = quantizer.amax.clone() if quantizer.use_existing_amax else engine.amax(inp)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=call.group)
    quantizer.use_existing_amax, quantizer.amax = True, amax
    world = dist.group.WORLD
    if (quantizer.amax_reduction_group or world) is (call.group or world):
        quantizer.with_amax_reduction = False


def _shard_of(call: _Gather, inp: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """inp in the directions that are sent."""
    shard = inp._twin()
    if isinstance(inp, Float8TensorStorage):
        shard.update_usage(True, False)
        quantizer = inp._quantizer
        agreed = isinstance(quantizer, Float8Quantizer) or getattr(quantizer, "with_amax_reduction", False)
        if not agreed or inp.device.type == "cpu":
            _check_scales(call, shard)
    elif _is_2d(inp):
        shard.update_usage(True, False)
    return shard


def _check_scales(call: _Gather, shard: Float8TensorStorage) -> None:
    """Raises the same ValueError on every rank if they quantized by different scales: the joined tensor has one scale.
    The host waits for the device, so it is called only if nothing else ensures equal scales."""
    own = shard._scale_inv.view(1)
    every = own.new_empty(call.ranks)
    dist.all_gather_into_tensor(every, own.contiguous(), group=call.group)
    if len(set(every.view(torch.int32).tolist())) > 1:
        raise ValueError(
            f"{call.op}: the ranks of the group quantized by different scales, 1 / {every.tolist()}; wanted one for "
            "the whole tensor: reduce the quantizers' amaxes over the group (with_amax_reduction), or gather the "
            "values with the quantizer."
        )


# ---- the joined tensor ----


def _gathered(
    call: _Gather, shard: QuantizedTensorStorage, inp: Any, quantizer: Quantizer | None
) -> tuple[QuantizedTensorStorage, Work]:
    shape = torch.Size((call.ranks * inp.shape[0], *inp.shape[1:]))
    specs = shard._specs(shape, {name: getattr(shard, name) for name in shard._details})
    rows = layout.fold(inp.shape)[0]
    parts: dict[str, torch.Tensor] = {}
    started: list[Any] = []
    after_gather: list[Callable[[], None]] = []
    for name, part in shard._tensors().items():
        kind = shard._kind(name)
        if kind == "scale":
            parts[name] = part
            continue
        target = parts[name] = layout.empty_part(specs[name], part.device)
        aside = kind == COLUMNWISE or (kind == layout.ROWWISE_SCALE and not _is_2d(shard))
        direct = not aside and target.is_contiguous()
        moved = target if direct else target.new_empty((call.ranks, *part.shape))
        flat = moved.view(-1)
        started.append(dist.all_gather_into_tensor(flat, part.contiguous().view(-1), group=call.group, async_op=True))
        if aside:
            after_gather.append(
                lambda name=name, moved=moved: _set(result, name, _side_by_side(moved, rows, specs[name].shape))
            )
        elif not direct:
            after_gather.append(lambda target=target, moved=moved: target.copy_(moved.view(target.shape)))
    result = shard._like(parts, shape) if quantizer is None else quantizer._from_parts(parts, shape, inp.dtype)

    @torch.no_grad()
    def finish() -> None:
        for step in after_gather:
            step()
        result.update_usage(call.rowwise, call.columnwise)

    return result, Work(started, finish)


def _set(result: QuantizedTensorStorage, name: str, part: torch.Tensor) -> None:
    setattr(result, name, part)


def _side_by_side(moved: torch.Tensor, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Matrices [ranks, n, rows and their padding] as the part of `shape` of the joined tensor."""
    return comm_interleave(moved.flatten(2)[..., :rows]).view(shape)
