"""The formats of FusedAdam's states: float32 or bfloat16 unchanged, float16 and E4M3 (uint8) as value / scale, low
halves of masters as int16; of plain, sharded (DTensor) and quantized parameters. Nothing is stepped here."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from transformer_engine.pytorch.distributed.dtensor import as_lies, is_sharded, local_of
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8Tensor,
    QuantizedTensor,
)

EXP_AVG, EXP_AVG_SQ, MASTER = "exp_avg", "exp_avg_sq", "master_param"

# The largest magnitude in a scaled state: scale = amax / it; and the smallest besides 0.
RANGES = {torch.float16: 32752.0, torch.uint8: 448.0}
_LEAST = {torch.float16: 2.0**-24, torch.uint8: 2.0**-9}
MOMENTS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
MASTERS = (torch.float32, torch.float16)

State = dict[str, torch.Tensor]


# ---- one state ----


def new_state(param: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(zeros in param's layout, and for a scaled state its scale and memory for maxima)."""
    local = local_of(param)
    if isinstance(local, QuantizedTensor):
        value = torch.zeros(local.shape, dtype=dtype, device=local.device)
    else:
        value = torch.zeros_like(local, dtype=dtype, requires_grad=False)
    pair = torch.tensor([1.0, 0.0], device=value.device) if dtype in RANGES else None
    return as_lies(param, value), pair


def lies_as(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether value has the shape and the layout of a state of param."""
    value, local = local_of(value), local_of(param)
    if value.shape != local.shape:
        return False
    if isinstance(local, QuantizedTensor) or local.is_contiguous():
        return value.is_contiguous()
    return value.stride() == local.stride()


def read(value: torch.Tensor, pair: torch.Tensor | None) -> torch.Tensor:
    """In float32; remainders unchanged."""
    if is_sharded(value):
        return as_lies(value, read(value._local_tensor, pair))
    if value.dtype in (torch.float32, torch.int16):
        return value
    floats = (value.view(torch.float8_e4m3fn) if value.dtype is torch.uint8 else value).float()
    return floats if pair is None else floats * pair[0]


def write(name: str, value: torch.Tensor, pair: torch.Tensor | None, given: torch.Tensor) -> None:
    """Sets value, the state of that name, and its scale to `given`. A result of read() is restored to the bit."""
    value, given = local_of(value), local_of(given)
    if pair is None or given.dtype is torch.uint8:
        value.copy_(given)
        if pair is not None:
            pair[0] = 1.0
        return
    given = given.to(value.device, torch.float32)
    pair[0] = scale = _scale_of(given, RANGES[value.dtype])  # (amax / range) * range / range: the same to the bit
    x = given / scale
    if name == EXP_AVG_SQ:  # as in the kernel: only 0 becomes 0
        x = torch.where(given > 0, x.clamp_min(_LEAST[value.dtype]), x)
    if value.dtype is torch.uint8:
        x = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    value.copy_(x)


def _scale_of(x: torch.Tensor, largest: float) -> torch.Tensor:
    """As the kernel computes it: ignoring NaN, with one rounding (CUDA divides by numbers, not by tensors, in two)."""
    amax = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax() if x.numel() else x.new_zeros(())
    scale = (amax / torch.full_like(amax, largest)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def apart(given: torch.Tensor, own: torch.Tensor, written: Set[tuple]) -> torch.Tensor:
    """given, or a copy if it shares memory that is written before it is read. own: the destination of its values."""
    local, target = local_of(given), local_of(own)
    return given if memory_key(local) not in written or _same_memory(local, target) else local.clone()


def memory_key(t: torch.Tensor) -> tuple:
    """Equal for tensors on the same storage."""
    t = local_of(t)
    return t.device, t.untyped_storage().data_ptr()


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


# ---- masters ----


def first_master(param: torch.Tensor) -> torch.Tensor:
    """The initial float32 values of a master: those that a quantized weight was made from, if they are kept and the
    weight still holds them, otherwise the weight's own."""
    local = local_of(param)
    if not isinstance(local, QuantizedTensor):
        return local.detach().float()
    values = local.detach().dequantize(dtype=torch.float32)
    kept = getattr(param, "get_high_precision_init_val", lambda: None)()
    if kept is None or kept.shape != values.shape:
        return values
    kept = kept.to(values.device, torch.float32)
    bounds = _rounding_bounds(local, kept)
    if bounds is not None:
        low, high = bounds
        return kept if bool(((low <= values) & (values <= high)).all()) else values
    # No format of 8 bits has a larger error: 2^-3 of a value, and below its normal numbers 2^-8 of the largest.
    near = 2.0**-3 * kept.abs() + 2.0**-8 * (kept.abs().amax() if kept.numel() else 0.0)
    return kept if bool(((kept - values).abs() <= near).all()) else values


def _rounding_bounds(local: QuantizedTensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bounds of the weight's values if it was made from `kept`; None if that is undecidable. With one scale for all
    the weight stores its inverse, and the scale computed from it may be off by its last bit."""
    if isinstance(local, Float8Tensor) and local._data is not None:

        def held(values: torch.Tensor) -> torch.Tensor:
            data = local._by_scale(values, local._scale_inv).reshape(local._data.shape)
            parts = {**local._tensors(), "_data": data, "_transpose": None}
            return local._like(parts, local.shape).dequantize(dtype=torch.float32)

        ends = held(kept * (1 - 2.0**-21)), held(kept * (1 + 2.0**-21))
        return torch.minimum(*ends), torch.maximum(*ends)
    if isinstance(local, Float8BlockwiseQTensor) and isinstance(local._quantizer, Float8BlockQuantizer):
        bounds = local._quantizer(kept).dequantize(dtype=torch.float32)
        return bounds, bounds
    return None


# ---- states of a checkpoint ----


def check_loaded(
    op: str, index: object, param: torch.Tensor, given: Mapping, wanted: Mapping[str, torch.dtype]
) -> None:
    """Raises ValueError unless `given` is a state of param. wanted: name -> the dtype in memory."""
    if set(given) != set(wanted):
        raise ValueError(
            f"{op}: the state of parameter {index} has {sorted(map(str, given))}, wanted {sorted(wanted)}; load it "
            "into an optimizer with the options of the one that saved it."
        )
    for name, dtype in wanted.items():
        check_value(op, f"'{name}' of parameter {index}", param, given[name], dtype)


def check_value(op: str, what: str, param: torch.Tensor, value: object, kept: torch.dtype) -> None:
    """Raises ValueError unless value can become a state of param that is stored as `kept`."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{op}: {what} is {value!r}, wanted a tensor.")
    like = param if is_sharded(value) else local_of(param)
    if value.shape != like.shape or (is_sharded(value) and value.placements != getattr(param, "placements", None)):
        raise ValueError(f"{op}: {what} has shape {list(value.shape)}, wanted {list(like.shape)}, cut like its weight.")
    if kept is torch.int16:
        allowed, words = (torch.int16,), "int16: masters are kept as remainders"
    else:
        allowed = (torch.float32, torch.bfloat16, torch.float16) + ((torch.uint8,) if kept is torch.uint8 else ())
        words = "float32"
    if value.dtype not in allowed:
        raise ValueError(f"{op}: {what} has dtype {value.dtype}, wanted {words}.")
