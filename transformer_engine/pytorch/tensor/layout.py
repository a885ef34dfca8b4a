"""The memory layout of quantized data: the shapes of the parts, the pitch that products read, buffers with it. No value
is computed here."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C

ROWWISE, COLUMNWISE, ROWWISE_SCALE, COLUMNWISE_SCALE = "rowwise", "columnwise", "rowwise scale", "columnwise scale"
DATA = (ROWWISE, COLUMNWISE)

PITCH = 16  # a row of data starts on 16 bytes, and a buffer has a multiple of 16 rows: transformer_engine/quantize.h
TENSOR, BLOCK_1D, BLOCK_2D = ([s[0] for s in _C.scalings].index(n) for n in ("TENSOR", "BLOCK_1D", "BLOCK_2D"))
BLOCK = _C.scalings[BLOCK_2D][1]
SCALES = 4  # block scales are padded to a multiple of it


class PartSpec(NamedTuple):
    """Dtype, shape and kind of a part of a tensor."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def fold(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns), leading dimensions folded; a scalar is one by one."""
    return math.prod(shape[:-1]), (shape[-1] if len(shape) else 1)


def transposed(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of columnwise data: the last dimension comes first."""
    return (*shape[-1:], *shape[:-1])


def untransposed(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[1:], *shape[:1])


def matrix_shape(kind: str, shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns of data of that kind."""
    if kind == COLUMNWISE:
        rows, cols = fold(untransposed(shape))
        return cols, rows
    return fold(shape)


def scale_shape(scaling: int, rows: int, cols: int) -> tuple[int, int]:
    """The blocks of data with these rows and columns: transformer_engine/scaling.h."""
    _, block_rows, block_cols, across, _ = _C.scalings[scaling]
    down, along = math.ceil(rows / block_rows), math.ceil(cols / block_cols)
    return (along, round_up(down, SCALES)) if across else (down, round_up(along, SCALES))


def data_bytes(rows: int, cols: int) -> int:
    """The bytes of a buffer of data, with its padding."""
    return round_up(rows, PITCH) * round_up(cols, PITCH)


def lay_out(buffer: torch.Tensor, kind: str, shape: Sequence[int]) -> torch.Tensor:
    """Data of `shape` in a buffer of data_bytes; the rest of the buffer is zeroed."""
    rows, cols = matrix_shape(kind, shape)
    pitch = round_up(cols, PITCH)
    if pitch != cols:
        buffer.zero_()
    elif rows % PITCH:
        buffer[rows * pitch :].zero_()
    return buffer.as_strided((rows, cols), (pitch, 1), buffer.storage_offset()).view(tuple(shape))


def empty_data(kind: str, shape: Sequence[int], device: torch.device | None, pin_memory: bool = False) -> torch.Tensor:
    """Data of `shape` in a buffer of its own."""
    size = data_bytes(*matrix_shape(kind, shape))
    return lay_out(torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory), kind, shape)


def empty_part(spec: PartSpec, device: torch.device | None, pin_memory: bool = False) -> torch.Tensor:
    if spec.kind in DATA:
        return empty_data(spec.kind, spec.shape, device, pin_memory)
    # One scale for all: 0 until the first write, by which a write to some rows detects that it is the first.
    make = torch.zeros if spec.kind == "scale" else torch.empty
    return make(spec.shape, dtype=spec.dtype, device=device, pin_memory=pin_memory)


def must_have_memory(part: torch.Tensor) -> None:
    """Raises if its storage has been freed: a copy would read or write missing memory."""
    if type(part) is torch.Tensor and not part.is_meta and part.untyped_storage().nbytes() == 0 and part.numel():
        raise RuntimeError(
            f"a quantized tensor's part {tuple(part.shape)} is used, but its memory has been freed; allocate it "
            "again (gather it) first."
        )


def copy_of(
    kind: str, part: torch.Tensor, device: torch.device | None = None, non_blocking: bool = False
) -> torch.Tensor:
    """A copy in memory of its own, on `device` if that is given."""
    must_have_memory(part)
    device = part.device if device is None else device
    if kind not in DATA:
        return part.to(device, non_blocking=non_blocking, copy=True)
    return empty_data(kind, part.shape, device).copy_(part, non_blocking=non_blocking)


def pitched(kind: str, part: torch.Tensor) -> torch.Tensor | None:
    """`part` as a matrix that products can read in place; None: it must be copied first."""
    rows, cols = matrix_shape(kind, part.shape)
    if part.numel() == 0 or part.is_meta or type(part) is not torch.Tensor:
        return part.reshape(rows, cols)
    pitch, start = round_up(cols, PITCH), part.storage_offset()
    if start % PITCH or part.untyped_storage().nbytes() < start + data_bytes(rows, cols):
        return None
    if rows == 1:  # its stride does not describe the memory after it
        return part.view(1, cols) if pitch == cols and part.is_contiguous() else None
    try:
        matrix = part.view(rows, cols)
    except RuntimeError:
        return None
    return matrix if matrix.stride() == (pitch, 1) else None


def matrix_of(kind: str, part: torch.Tensor) -> torch.Tensor:
    """`part` as a matrix that products can read: itself, or a copy."""
    found = pitched(kind, part)
    return copy_of(kind, part).view(matrix_shape(kind, part.shape)) if found is None else found
