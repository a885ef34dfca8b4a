"""The contents of a module's `_extra_state`: scales and amax histories of delayed scaling, as bytes of a checkpoint.
Reading trusts nothing: each mismatch is named. module/api.py has the methods that torch calls. te_state.py handles
pickles: it reads those of other versions of the API, and writes GroupedLinear's.

Bytes: 8 of magic and version, 4 the length of the header, the header (JSON, padded so that the size depends on the
histories' shapes alone), then float32, little endian: forward scale, forward history, backward scale, backward history.
"""

from __future__ import annotations

import io
import json
import struct
import zlib

import torch

from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.quantization.checkpoint import te_state
from transformer_engine.pytorch.quantization.checkpoint.loaded import Foreign as Foreign  # raised by unpack
from transformer_engine.pytorch.quantization.checkpoint.loaded import Loaded, Unfit
from transformer_engine.pytorch.quantization.delayed import ScalingState

_MAGIC, _VERSION, _HEADER = b"TE-FP8\0", 1, 500
torch.serialization.add_safe_globals([io.BytesIO])  # other versions of the API store their state as bytes in it
_LONGEST = 1 << 24  # rows of a history, and columns: far beyond any in use, and their product fits in memory


def pack(forward: ScalingState, backward: ScalingState) -> torch.Tensor:
    """uint8, on the CPU."""
    arrays = [t.detach().cpu().numpy().astype("<f4") for s in (forward, backward) for t in (s.scale, s.amax_history)]
    payload = b"".join(array.tobytes() for array in arrays)
    header = {
        "margin": forward.rule.margin,
        "fp8_format": forward.rule.fp8_format.name,
        "forward": list(forward.amax_history.shape),
        "backward": list(backward.amax_history.shape),
        "crc32": zlib.crc32(payload),
    }
    text = json.dumps(header).encode().ljust(_HEADER)
    data = _MAGIC + bytes([_VERSION]) + struct.pack("<I", len(text)) + text + payload
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# The value that torch.distributed.checkpoint.set_model_state_dict passes if a checkpoint has no state of a module.
_MISSING = ("torch.distributed.checkpoint.state_dict", "_EXTRA_STATE")


def bytes_of(state: object) -> bytes:
    """The bytes of None, a uint8 tensor or an io.BytesIO, which other versions of the API wrote."""
    if state is None or (type(state).__module__, type(state).__name__) == _MISSING:
        return b""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, torch.Tensor):
        plain = state.layout is torch.strided and not state.is_nested
        if plain and state.numel() == 0:
            return b""
        if not plain or state.is_meta:
            kind = "on the meta device" if state.is_meta else "nested" if state.is_nested else str(state.layout)
            raise Unfit(f"is a tensor without bytes to read ({kind}), wanted a dense uint8 tensor")
        if state.dtype is torch.uint8:
            held = state.untyped_storage().nbytes()
            if held < state.numel():  # expanded, which a copy would fill, or freed
                raise Unfit(f"is a tensor of {state.numel()} bytes in {held} of memory, wanted all of them")
            return state.detach().cpu().contiguous().numpy().tobytes()
    kind = str(state.dtype) if isinstance(state, torch.Tensor) else type(state).__name__
    raise Unfit(f"is a {kind}, wanted a uint8 tensor or an io.BytesIO")


def unpack(data: bytes, columns: tuple[int, int]) -> tuple[Loaded, Loaded] | None:
    """(forward, backward) for histories with so many columns; None for no state. Errors: Unfit, and Foreign for states
    of Transformer Engine for other tensors."""
    if not data:
        return None
    if not data.startswith(_MAGIC):
        return te_state.unpack(data, columns)
    start = len(_MAGIC) + 5
    if len(data) < start:
        raise Unfit(f"is truncated to {len(data)} bytes")
    if data[len(_MAGIC)] != _VERSION:
        raise Unfit(f"has format version {data[len(_MAGIC)]}, wanted {_VERSION}")
    (length,) = struct.unpack("<I", data[start - 4 : start])
    if length != _HEADER or len(data) < start + length:
        raise Unfit(f"is damaged or truncated: a header of {length} bytes in {len(data)}, wanted one of {_HEADER}")
    try:
        header = json.loads(data[start : start + length])
        shapes = [tuple(header["forward"]), tuple(header["backward"])]
        rule = DelayedScaling(margin=header["margin"], fp8_format=Format[header["fp8_format"]])
        crc = header["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unfit(f"is damaged: {type(error).__name__} in its header ({error})") from None
    for shape, wanted in zip(shapes, columns, strict=True):
        valid = len(shape) == 2 and all(isinstance(n, int) and 1 <= n <= _LONGEST for n in shape)
        if not valid or shape[1] != wanted:
            raise Unfit(f"has an amax history of shape {list(shape)}, wanted [length, {wanted}]")
    payload = data[start + length :]
    wanted_bytes = sum(4 * (1 + rows) * cols for rows, cols in shapes)
    if len(payload) != wanted_bytes:
        raise Unfit(f"has {len(payload)} bytes of scales and histories, wanted {wanted_bytes}")
    if zlib.crc32(payload) != crc:
        raise Unfit("is damaged: its checksum differs")
    import numpy  # here: importing the package must import nothing besides torch

    values = torch.from_numpy(numpy.frombuffer(payload, dtype="<f4").astype(numpy.float32))
    found = []
    for rows, cols in shapes:
        scale, history = values[:cols], values[cols : cols * (1 + rows)].view(rows, cols)
        values = values[cols * (1 + rows) :]
        found.append(Loaded.checked(rule, scale, history))
    return tuple(found)
