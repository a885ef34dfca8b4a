"""torch's operations on a quantized tensor: a few keep it quantized, the rest compute with its values, and an in-place
operation quantizes its result. One table for all formats."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.registry import FLOATS
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.values_view import is_view, shown, written_by

aten = torch.ops.aten

_RULES: dict[Any, Callable] = {}

# Their results do not depend on the old values; this holds for operations that draw random numbers, too.
_FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}


# A subclass without parts has these too.
_OF_EVERY_CLASS = {aten.detach.default, aten.alias.default, aten.clone.default, aten.copy_.default}


class _Otherwise(Exception):
    """A rule does not apply to these arguments: compute with the values."""


def _rule(*ops: Any) -> Callable:
    def register(rule: Callable) -> Callable:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs), at least one of them a quantized tensor."""
    if torch.is_inference_mode_enabled() and is_view(func):  # torch counts the versions of a view and its base as one
        with torch.inference_mode(any(isinstance(t, torch.Tensor) and t.is_inference() for t in args)), torch.no_grad():
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rule = _RULES.get(func)
    if rule is not None and (func in _OF_EVERY_CLASS or not any(_is_quantized(t) and t._is_direct() for t in args)):
        try:
            return rule(*args, **kwargs)
        except _Otherwise:
            pass
    return _with_values(func, args, kwargs)


def _is_quantized(value: object) -> bool:
    return isinstance(value, QuantizedTensorStorage)


# ---- operations without a rule ----


def _with_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    values: dict[int, torch.Tensor] = {}

    def value_of(given: Any) -> Any:
        if not _is_quantized(given):
            return given
        if id(given) not in values:
            values[id(given)] = given._dequantize(given.dtype)
        return values[id(given)]

    result = func(*pytree.tree_map(value_of, list(args)), **pytree.tree_map(value_of, kwargs))
    if is_view(func):
        t = next(given for given in (*args, *kwargs.values()) if _is_quantized(given))
        own = any(part is values[id(t)] for part in t._tensors().values())  # unquantized: a view of memory
        return result if own else shown(result, func, type(t).__name__)
    back = {}  # tensors that func wrote into, and may have returned
    for given in written_by(func, args, kwargs, _is_quantized):
        value = values[id(given)]
        back[id(value)] = given
        if func in _FILLS or torch.Tag.nondeterministic_seeded in func.tags or _generates(func, args):
            given._values_to_come()
        given.quantize_(value)
    return pytree.tree_map(lambda t: back.get(id(t), t), result) if back else result


def _generates(func: Any, args: Sequence[Any]) -> bool:
    """Whether it writes (to out=) without reading any tensor."""
    target = func._schema.arguments[-1]
    tensors = any(isinstance(t, torch.Tensor) for a in args for t in (a if isinstance(a, (list, tuple)) else [a]))
    return target.kwarg_only and target.alias_info is not None and target.alias_info.is_write and not tensors


# ---- the same tensor, another one of the kind ----


@_rule(aten.detach.default, aten.alias.default)
def _alias(t: QuantizedTensorStorage) -> QuantizedTensorStorage:
    return t._alias(t._tensors(), t.shape)


@_rule(aten.clone.default)
def _clone(t: QuantizedTensorStorage, *, memory_format: Any = None) -> QuantizedTensorStorage:
    result = t._like(t._copied(), t.shape)
    if t._is_direct():
        own = {name: value for name, value in result.__dict__.items() if isinstance(value, torch.Tensor)}
        result.__dict__.update({name: value.clone() for name, value in own.items()})
    return result


@_rule(aten._to_copy.default)
def _to_copy(
    t: QuantizedTensorStorage,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool = False,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> QuantizedTensorStorage:
    if dtype is not None and dtype not in FLOATS:
        raise _Otherwise
    parts = t._copied(None if device is None else torch.device(device), non_blocking)
    if pin_memory:
        parts = {name: part.pin_memory() for name, part in parts.items()}
    return t._like(parts, t.shape, dtype=dtype)


@_rule(aten.is_pinned.default)
def _is_pinned(t: QuantizedTensorStorage, device: torch.device | None = None) -> bool:
    return all(part.is_pinned() for part in t._tensors().values())


@_rule(aten._pin_memory.default)
def _pin_memory(t: QuantizedTensorStorage, device: torch.device | None = None) -> QuantizedTensorStorage:
    return t._like({name: part.pin_memory() for name, part in t._tensors().items()}, t.shape)


# ---- new ones ----


def _empty(t: QuantizedTensorStorage, shape: Sequence[int], given: dict[str, Any]) -> QuantizedTensorStorage:
    """Like t, in `shape`, in uninitialised memory."""
    dtype = given.get("dtype") or t.dtype
    if dtype not in FLOATS:
        raise _Otherwise
    device = torch.device(given.get("device") or t.device)
    return t._like(t._empty_parts(shape, device, bool(given.get("pin_memory"))), shape, dtype=dtype)


@_rule(aten.empty_like.default)
def _empty_like(t: QuantizedTensorStorage, **given: Any) -> QuantizedTensorStorage:
    return _empty(t, t.shape, given)


@_rule(aten.new_empty.default)
def _new_empty(t: QuantizedTensorStorage, shape: Sequence[int], **given: Any) -> QuantizedTensorStorage:
    return _empty(t, shape, given)


@_rule(aten.new_zeros.default)
def _new_zeros(t: QuantizedTensorStorage, shape: Sequence[int], **given: Any) -> QuantizedTensorStorage:
    """Rowwise data alone, if there are any: FSDP2 makes shards like that, which need no more."""
    result = _empty(t, shape, given)
    if result.get_usages()[layout.ROWWISE]:
        result.update_usage(columnwise_usage=False)
    result._zero()
    return result


# ---- new values ----


@_rule(aten.copy_.default)
def _copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not _is_quantized(dst):
        return dst.copy_(src._dequantize(src.dtype), non_blocking)
    if _is_quantized(src):
        if dst.shape == src.shape and dst.copy_from_storage(src):
            return dst
        src = src._dequantize(src.dtype)
    if dst.shape != src.shape:
        src = src.expand(dst.shape)
    if src.dtype not in FLOATS:
        src = src.to(dst.dtype)
    return dst.quantize_(src.to(dst.device))


# ---- views ----


def _view_of(t: QuantizedTensorStorage, parts: dict | None, shape: Sequence[int]) -> QuantizedTensorStorage:
    if parts is None:
        raise _Otherwise
    return t._alias(parts, shape)


@_rule(aten.view.default, aten._unsafe_view.default)
def _view(t: QuantizedTensorStorage, shape: Sequence[int]) -> QuantizedTensorStorage:
    wanted = _inferred(t, shape)
    return _view_of(t, t._tensors() if wanted == tuple(t.shape) else t._viewed(wanted), wanted)


def _inferred(t: QuantizedTensorStorage, shape: Sequence[int]) -> tuple[int, ...]:
    """shape, with its -1 resolved."""
    if -1 not in shape:
        return tuple(shape)
    rest = 1
    for n in shape:
        rest *= 1 if n == -1 else n
    if rest == 0:
        raise _Otherwise
    return tuple(t.numel() // rest if n == -1 else n for n in shape)


@_rule(aten.as_strided.default)
def _as_strided(
    t: QuantizedTensorStorage, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensorStorage:
    if tuple(size) != tuple(t.shape) or tuple(stride) != tuple(t.stride()) or offset:
        raise _Otherwise
    return _alias(t)


@_rule(aten.slice.Tensor)
def _slice(
    t: QuantizedTensorStorage, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensorStorage:
    if dim % t.dim() or step != 1:
        raise _Otherwise
    first, last, _ = slice(start, end).indices(t.shape[0])
    return _some_rows(t, first, max(first, last))


@_rule(aten.split.Tensor)
def _split(t: QuantizedTensorStorage, size: int, dim: int = 0) -> list[QuantizedTensorStorage]:
    if dim % t.dim() or size <= 0:
        raise _Otherwise
    rows = t.shape[0]
    return [_some_rows(t, first, min(first + size, rows)) for first in range(0, max(rows, 1), size)]


@_rule(aten.split_with_sizes.default)
def _split_with_sizes(t: QuantizedTensorStorage, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensorStorage]:
    if dim % t.dim() or sum(sizes) != t.shape[0] or min(sizes, default=0) < 0:
        raise _Otherwise  # torch raises its own error
    ends = list(itertools.accumulate(sizes))
    return [_some_rows(t, last - size, last) for size, last in zip(sizes, ends)]


def _some_rows(t: QuantizedTensorStorage, first: int, last: int) -> QuantizedTensorStorage:
    """Rows [first, last), in the directions that t has, as a view."""
    if last - first == t.shape[0]:
        return _alias(t)
    rows = _view_of(t, t._rows(first, last), (last - first, *t.shape[1:]))
    rows._are_rows_of(t, first)
    return rows


# ---- rows in another order (functional/permute.py) ----


@_rule(torch.ops.te.permute_fwd.default)
def _permute(t: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the same format, with the same bytes."""
    *of_map, _, rows = args
    data, scales = _rowwise(t)
    moved, probs, moved_scales = torch.ops.te.permute_fwd(t._tensors()[data], *of_map, t._tensors().get(scales), rows)
    parts = {data: moved} if scales is None else {data: moved, scales: moved_scales}
    return t._like(_with_one_scale(t, parts), moved.shape), probs, moved_scales.new_empty(0)


@_rule(torch.ops.te.permute_gather_fwd.default)
def _permute_gather(t: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    data, scales = _rowwise(t)
    if scales is not None:
        raise _Otherwise
    moved = torch.ops.te.permute_gather_fwd(t._tensors()[data], source)
    return t._like(_with_one_scale(t, {data: moved}), moved.shape)


def _rowwise(t: torch.Tensor) -> tuple[str, str | None]:
    """The names of the rowwise data and of the scales that move with their rows."""
    names = t._row_parts() if _is_quantized(t) else None
    if names is None:
        raise _Otherwise
    return names


def _with_one_scale(t: QuantizedTensorStorage, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Besides `parts`, a copy of the scale that all elements share: writes to t would change t's own."""
    scales_of_all = {name: t._tensors()[name].clone() for name in t._names("scale") if name in t._tensors()}
    return parts | scales_of_all
