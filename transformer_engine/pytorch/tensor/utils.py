"""Quantized weights whose values are sharded over ranks: moving their data to another address, casting masters into
them part by part, and deriving columnwise data after a gather. The engine computes (te_quantize_range_*); nothing is
gathered here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import debug_has_internal_overlap
from transformer_engine.pytorch.tensor import engine, layout
from transformer_engine.pytorch.tensor.float8_delayed import Float8Quantizer
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, ROWWISE
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.registry import FLOATS
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_SET_ASIDE = "_columnwise_set_aside"  # parts whose memory waits for post_all_gather_processing
# Scales of weights of which an optimizer has stepped rows since the last post_all_gather_processing -> (its skip flag).
_steps_of_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


# ---- the address of the data ----


@torch.no_grad()
def replace_raw_data(tensor: QuantizedTensorStorage, new_raw_data: torch.Tensor) -> None:
    """Moves tensor's rowwise data, with their values, to new_raw_data: a write there, as by a gather into a buffer that
    it is a view of, is a write to the tensor.

    new_raw_data: of the data's shape, dtype and device, rows dense, any pitch. Errors: ValueError for others, TypeError
    unless it is a quantized tensor, NotImplementedError for a format of two, RuntimeError without rowwise data."""
    op = "replace_raw_data"
    if not isinstance(tensor, QuantizedTensorStorage):
        raise TypeError(f"{op}: argument 'tensor' is a {type(tensor).__name__}, wanted a quantized tensor.")
    if not tensor._gathered:
        raise NotImplementedError(
            f"{op}: argument 'tensor' is a {type(tensor).__name__}, whose data belong to its two parts; wanted a "
            "tensor of one format."
        )
    _must_not_be_rows(op, "argument 'tensor'", tensor)
    field = tensor._gathered[0]
    old = getattr(tensor, field)
    if old is None:
        raise RuntimeError(f"{op}: argument 'tensor' has no rowwise data, wanted update_usage(rowwise_usage=True).")
    if type(new_raw_data) is not torch.Tensor:
        raise TypeError(f"{op}: argument 'new_raw_data' is a {type(new_raw_data).__name__}, wanted a plain tensor.")
    for what in ("dtype", "device", "shape"):
        got, wanted = getattr(new_raw_data, what), getattr(old, what)
        if got != wanted:
            raise ValueError(f"{op}: argument 'new_raw_data' is of {what} {got}, wanted {wanted}, the data's.")
    dense = new_raw_data.is_contiguous() or layout.fold(new_raw_data.shape)[1] <= 1 or new_raw_data.stride(-1) == 1
    if not dense or debug_has_internal_overlap(new_raw_data) == 1:
        raise ValueError(
            f"{op}: argument 'new_raw_data' has strides {new_raw_data.stride()}, wanted dense rows that do not overlap."
        )
    shared = new_raw_data.untyped_storage().data_ptr() == old.untyped_storage().data_ptr()
    new_raw_data.copy_(old.clone() if shared else old)
    setattr(tensor, field, new_raw_data.detach())


def _must_not_be_rows(op: str, name: str, tensor: QuantizedTensorStorage) -> None:
    if tensor._rows_of is not None:
        raise NotImplementedError(
            f"{op}: {name} is a view of some rows of another quantized tensor, whose scale is not its own; wanted the "
            "whole."
        )


# ---- masters ----


class _Weight:
    """A weight, and the present part of its master: elements of the flattened weight from `start` on."""

    def __init__(
        self, op: str, where: str, weight: Any, master: Any, start: Any, shard: Any, device: torch.device | None
    ) -> None:
        self.weight, self.quantizer = weight, _quantizer_of(op, f"model_weights{where}", weight)
        self.shape = layout.fold(weight.shape)
        if device is not None and weight.device != device:
            raise ValueError(f"{op}: model_weights{where} is on {weight.device}, wanted {device} like the first one.")
        if (master is None) != (start is None):
            raise ValueError(
                f"{op}: master_weights{where} is {'None' if master is None else 'given'} and start_offsets{where} "
                f"{start!r}, wanted both None where this rank has nothing of the weight."
            )
        layout.must_have_memory(getattr(weight, self._scale_field))
        self.start, self.x = 0, torch.empty(0, device=weight.device)
        if master is not None:
            self.start, self.x = self._checked_master(op, where, master, start)
        self.data = self._checked_data(op, where, shard)
        blocks = [math.ceil(n / layout.BLOCK) for n in self.shape]
        self.amaxes_shape = blocks if self.scaling == layout.BLOCK_2D else [1]

    @property
    def scaling(self) -> int:
        return layout.BLOCK_2D if self.quantizer._built_in().kind == "block2d" else layout.TENSOR

    @property
    def _scale_field(self) -> str:
        return (self.weight._names("scale") or self.weight._names(f"{ROWWISE} scale"))[0]

    def _checked_master(self, op: str, where: str, master: Any, start: Any) -> tuple[int, torch.Tensor]:
        name, n = f"{op}: master_weights{where}", self.weight.numel()
        if type(master) not in (torch.Tensor, torch.nn.Parameter) or master.dtype not in FLOATS:
            got = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
            raise ValueError(f"{name} is a {got}, wanted a plain tensor of float32, float16 or bfloat16.")
        if master.device != self.weight.device:
            raise ValueError(f"{name} is on {master.device}, wanted {self.weight.device}, the weight's.")
        if isinstance(start, bool) or not isinstance(start, int):
            raise ValueError(f"{op}: start_offsets{where} is {start!r}, wanted an int.")
        if not 0 <= start <= n - master.numel():
            raise ValueError(
                f"{name} is elements {start} to {start + master.numel()} of the weight (start_offsets{where}), "
                f"wanted some of the {n} that it has."
            )
        return start, master.detach().reshape(-1)

    def _checked_data(self, op: str, where: str, shard: Any) -> torch.Tensor:
        """The destination of the bytes: a shard's own memory, or the weight's."""
        if shard is not None:
            plain = type(shard) is torch.Tensor and shard.dtype is torch.uint8 and shard.is_contiguous()
            if not plain or shard.device != self.weight.device or shard.numel() != self.x.numel():
                got = type(shard).__name__
                if isinstance(shard, torch.Tensor):
                    got = f"{shard.dtype} {list(shard.shape)} on {shard.device}"
                raise ValueError(
                    f"{op}: fsdp_shard_model_weights{where} is {got}, wanted contiguous uint8 of {self.x.numel()} "
                    f"elements, as many as the master has, on {self.weight.device}."
                )
            return shard.view(-1)
        data = getattr(self.weight, self.weight._names(ROWWISE)[0])
        if data is None:
            raise RuntimeError(
                f"{op}: model_weights{where} has no rowwise data, wanted update_usage(rowwise_usage=True) before."
            )
        layout.must_have_memory(data)
        try:
            return data.view(self.shape)
        except RuntimeError:
            raise ValueError(
                f"{op}: model_weights{where} has data of strides {data.stride()} for {tuple(data.shape)}, wanted rows "
                "of one pitch."
            ) from None

    @property
    def scale_inv(self) -> torch.Tensor:
        return getattr(self.weight, self._scale_field)

    def add_to(self, calls: _C.RangeCasts, amaxes: torch.Tensor) -> list[torch.Tensor]:
        """amaxes: of the whole weight. Returns the other tensors that the cast reads or writes."""
        state = self.quantizer._range_state(amaxes.device)
        scale, amax = state.get("scale"), state.get("amax")
        spec, dtype = self.quantizer._built_in().spec, self.weight.dtype
        calls.add(self.x, self.data, self.scale_inv, amaxes, scale, amax, *self.shape, self.start, dtype, spec)
        return [t for t in (self.x, self.data, self.scale_inv, scale, amax) if t is not None]


def _quantizer_of(op: str, name: str, weight: Any) -> Any:
    """The quantizer of the weight. Errors: for weights that cannot be quantized in parts."""
    if not isinstance(weight, QuantizedTensorStorage):
        raise TypeError(f"{op}: {name} is a {type(weight).__name__}, wanted a quantized tensor.")
    quantizer = weight._get_quantizer()
    if not quantizer._by_ranges() or not quantizer._makes_the_same(quantizer, weight):
        raise NotImplementedError(
            f"{op}: {name} is a {type(weight).__name__} of {quantizer!r}, which cannot be quantized in parts; wanted "
            "delayed or current scaling, or 128x128 blocks, by a built-in quantizer that computes its own amaxes."
        )
    _must_not_be_rows(op, name, weight)
    if not engine.is_plain(*weight._tensors().values()):
        raise NotImplementedError(f"{op}: {name} is on the meta device or traced, wanted data.")
    return quantizer


def _checked_lists(op: str, lists: Sequence[Any]) -> Sequence[Any]:
    """The weights. Errors: for an argument that is not a list, or of another length."""
    names = ("model_weights", "master_weights", "start_offsets", "fsdp_shard_model_weights")
    weights = lists[0]
    for name, given in zip(names, lists):
        if given is None and name == names[-1]:
            continue
        if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Sequence):
            raise TypeError(f"{op}: argument '{name}' is a {type(given).__name__}, wanted a list.")
        if len(given) != len(weights):
            raise ValueError(f"{op}: argument '{name}' has {len(given)} elements, wanted {len(weights)}, as the first.")
    return weights


def _weights_of(op: str, weights: Any, masters: Any, starts: Any, shards: Any) -> list[_Weight]:
    shards = shards or [None] * len(weights)
    found: list[_Weight] = []
    for i, (weight, master, start, shard) in enumerate(zip(weights, masters, starts, shards)):
        device = found[0].weight.device if found else None
        found.append(_Weight(op, f"[{i}]", weight, master, start, shard, device))
    return found


def _reduced(amaxes: torch.Tensor, group: Any) -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1:
        distributed.all_reduce(amaxes, distributed.ReduceOp.MAX, group=group)


class Casts:
    """Parts of masters and the weights that they go into, checked here. lists: those of quantize_master_weights, of one
    weight at least. run() may be called again while these are the same."""

    def __init__(self, op: str, lists: Sequence[Any]) -> None:
        self.parts = _weights_of(op, *lists)
        sizes = [math.prod(part.amaxes_shape) for part in self.parts]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=self.parts[0].weight.device)
        self._calls, self._fits, self.memory = _C.RangeCasts(), [], []
        for part, found in zip(self.parts, self._buffer.split(sizes)):
            amaxes, quantizer = found.view(part.amaxes_shape), part.quantizer
            self.memory.append(part.add_to(self._calls, amaxes))
            if type(quantizer)._fit_range is not Quantizer._fit_range:
                self._fits.append((quantizer, amaxes))

    def run(self, group: Any) -> None:
        """Writes bytes and scales. Nothing else of the weights changes."""
        self._buffer.zero_()
        self._calls.note_amaxes()
        _reduced(self._buffer, group)
        for quantizer, amaxes in self._fits:
            quantizer._fit_range(amaxes)
        self._calls.cast()


@torch.no_grad()
def _cast_masters(op: str, lists: Sequence[Any], group: Any, keep_columnwise: bool) -> None:
    weights = _checked_lists(op, lists)
    if not weights:
        return
    casts = Casts(op, lists)
    for i, weight in enumerate(weights):
        if weight._keeps_columnwise and not keep_columnwise:
            raise ValueError(
                f"{op}: model_weights[{i}] has columnwise data that a captured graph reads, and "
                "manual_post_all_gather_processing is False, wanted True: a replay would not recompute them. Call "
                "post_all_gather_processing after the gather."
            )
    casts.run(group)
    for weight in weights:
        weight._count_write()
        _drop_columnwise(weight, keep_columnwise)
        weight._reach_aliases()


def quantize_master_weights(
    model_weights: Sequence[QuantizedTensorStorage],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Casts this rank's part of each weight's master into the weight, as a part of the whole: bytes and scales equal
    those of the whole master quantized at once in the weight's dtype, on every rank, however it is cut.

    master_weights: float32, float16 or bfloat16; elements of the flattened weight from start_offsets on, both None if
    this rank has none. The lists are alike on all ranks of `group`, which communicate once: one MAX of all amaxes.
    fsdp_shard_model_weights: uint8 memory for the bytes of the present parts, None: into the weight's own data.
    Afterwards the caller gathers the bytes. The next forward that needs columnwise data derives them, or, with
    manual_post_all_gather_processing, post_all_gather_processing does, in their old memory.

    Formats: delayed scaling (by its scale; the amaxes go into its history), current scaling, 128x128 blocks. Errors:
    TypeError and ValueError for lists, parts and memory that do not fit, NotImplementedError for other formats, and
    nothing is written then."""
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    _cast_masters("quantize_master_weights", lists, group, manual_post_all_gather_processing)


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensorStorage],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """quantize_master_weights, by its older name."""
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    _cast_masters("cast_master_weights_to_fp8", lists, group, manual_post_all_gather_processing)


# ---- the columnwise direction ----


def _columnwise(weight: QuantizedTensorStorage) -> dict[str, torch.Tensor]:
    """Its columnwise parts, or the memory of earlier ones, unless it has moved or changed its shape."""
    present = {n: t for n in weight._of_direction(COLUMNWISE) if (t := getattr(weight, n)) is not None}
    aside = weight.__dict__.get(_SET_ASIDE, {})
    specs = weight._specs(tuple(weight.shape), {n: getattr(weight, n) for n in weight._details})
    fits = all(t.device == weight.device and t.shape == specs[n].shape for n, t in aside.items())
    return present or (aside if fits else {})


def _drop_columnwise(weight: QuantizedTensorStorage, keep: bool) -> None:
    old = _columnwise(weight)
    weight.__dict__.pop(_SET_ASIDE, None)
    weight.update_usage(columnwise_usage=False)
    if keep and old:
        weight.__dict__[_SET_ASIDE] = old


def _derivable(op: str, weights: Any) -> list[QuantizedTensorStorage]:
    """The `weights` whose columnwise data are derived from the rowwise data. Errors: if that is impossible."""
    found = []
    for i, weight in enumerate([weights] if isinstance(weights, QuantizedTensorStorage) else weights):
        if not isinstance(weight, QuantizedTensorStorage):
            raise TypeError(f"{op}: model_weights[{i}] is a {type(weight).__name__}, wanted a quantized tensor.")
        if not weight._of_direction(COLUMNWISE):
            continue  # its values serve both directions
        if not weight._derivable():
            raise NotImplementedError(
                f"{op}: model_weights[{i}] is a {type(weight).__name__} whose columnwise data cannot be derived from "
                "the rowwise data; wanted one scale a tensor, or 128x128 blocks."
            )
        if not weight.get_usages()[ROWWISE]:
            raise RuntimeError(
                f"{op}: model_weights[{i}] has no rowwise data to derive columnwise data from; quantize it again with "
                "rowwise=True."
            )
        layout.must_have_memory(getattr(weight, weight._names(ROWWISE)[0]))
        found.append(weight)
    return found


def note_step_of_rows(weight: QuantizedTensorStorage, noop: torch.Tensor | None) -> None:
    """Rows of a weight under delayed scaling were written by the recipe's scale, unless noop is set: other ranks may
    have written other weights of the same buffer."""
    _steps_of_rows[weight._scale_inv] = (noop,)


def take_scales_of_the_step(weights: Sequence[QuantizedTensorStorage]) -> None:
    """Weights that other ranks have stepped, in one buffer with some that this rank has stepped rows of, get the
    recipe's scale, which is the same on all ranks."""
    if not _steps_of_rows:
        return
    delayed = [w for w in weights if isinstance(w._quantizer, Float8Quantizer)]
    if not any(w._scale_inv in _steps_of_rows for w in delayed):
        return
    steps = [_steps_of_rows.pop(w._scale_inv, None) for w in delayed]
    buffers = [w._data.untyped_storage().data_ptr() for w in delayed]
    flags = {buffer: step[0] for buffer, step in zip(buffers, steps) if step is not None}
    for weight, step, buffer in zip(delayed, steps, buffers):
        if step is None and buffer in flags:
            noop, scale_inv = flags[buffer], weight._quantizer.scale.reciprocal().view(1)
            weight._scale_inv.copy_(scale_inv if noop is None else torch.where(noop == 0, scale_inv, weight._scale_inv))


@torch.no_grad()
def post_all_gather_processing(model_weights: QuantizedTensorStorage | Sequence[QuantizedTensorStorage]) -> None:
    """Derives columnwise data after the rowwise data of these weights have been gathered: for weights that have
    columnwise data, that had them before the cast of their master, or whose quantizer requests them; in their old
    memory. Under delayed scaling, if FusedAdam has stepped rows of some of them here, those of the same buffer that
    other ranks have stepped get the recipe's scale, as there.

    Errors: NotImplementedError for formats whose two directions hold different values, RuntimeError without rowwise
    data, TypeError unless it is a quantized tensor; nothing is written then."""
    weights = _derivable("post_all_gather_processing", model_weights)
    take_scales_of_the_step(weights)
    for weight in weights:
        old = _columnwise(weight)
        _drop_columnwise(weight, False)
        if old or (weight._quantizer is not None and weight._quantizer.columnwise_usage):
            weight._derive(COLUMNWISE, old)
        weight._reach_aliases()


@torch.no_grad()
def clear_columnwise_cache(model_weights: QuantizedTensorStorage | Sequence[QuantizedTensorStorage]) -> None:
    """Drops columnwise data, and memory that is reserved for them; the next forward that needs them derives them from
    the rowwise data. A DistributedOptimizer that steps FP8 weights holds theirs until its next step. Errors: as of
    post_all_gather_processing, and RuntimeError for data that a captured graph reads."""
    weights = _derivable("clear_columnwise_cache", model_weights)
    if any(w._keeps_columnwise for w in weights):
        raise RuntimeError(
            "clear_columnwise_cache: a captured graph reads columnwise data of a weight in argument 'model_weights', "
            "wanted weights that no graph has captured: a replay would read memory that may belong to another tensor."
        )
    for weight in weights:
        _drop_columnwise(weight, False)
