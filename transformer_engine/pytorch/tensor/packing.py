"""Several tensors quantized into one byte buffer: one allocation for all their data, scales and amaxes. Each quantizer
does its own arithmetic."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.arguments import source_of
from transformer_engine.pytorch.tensor.registry import AnyQuantized

ALIGNMENT = 256  # of the data; the small parts after it are aligned to 16
SMALL_ALIGNMENT = 16
AMAX = "_amax"


class _Quantizer(Protocol):
    """The methods of a quantizer that are used here."""

    storage_class: type | None
    _python_written: bool

    def _wanted_specs(self, shape: Sequence[int]) -> dict[str, layout.PartSpec]: ...

    def _from_parts(
        self, parts: dict[str, torch.Tensor | None], shape: Sequence[int], dtype: torch.dtype
    ) -> AnyQuantized: ...

    def _write(self, x: torch.Tensor, dst: Any) -> None: ...

    def _recording(self, amax: torch.Tensor) -> "_Quantizer | None": ...

    def _take_note_of(self, amax: torch.Tensor) -> None: ...


class _Place(NamedTuple):
    tensor: int
    name: str
    spec: layout.PartSpec
    bytes: int


def _places(sources: Sequence[torch.Tensor], quantizers: Sequence[_Quantizer]) -> list[_Place]:
    """The contents of the buffer: data first, then the small parts."""
    data, small = [], []
    for i, (source, quantizer) in enumerate(zip(sources, quantizers)):
        specs = quantizer._wanted_specs(source.shape)
        if quantizer._recording(source) is not None:
            specs[AMAX] = layout.PartSpec("amax", torch.float32, (1,))
        for name, spec in specs.items():
            if spec.kind in layout.DATA:
                data.append(_Place(i, name, spec, layout.data_bytes(*layout.matrix_shape(spec.kind, spec.shape))))
            else:
                count = torch.Size(spec.shape).numel()
                small.append(_Place(i, name, spec, count * spec.dtype.itemsize))
    return data + small


def _laid_out(places: Sequence[_Place], device: torch.device) -> list[torch.Tensor]:
    """A view of one new buffer for each of `places`."""
    offsets, end = [], 0
    for place in places:
        offsets.append(layout.round_up(end, ALIGNMENT if place.spec.kind in layout.DATA else SMALL_ALIGNMENT))
        end = offsets[-1] + place.bytes
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    views = []
    for place, offset in zip(places, offsets):
        piece = buffer[offset : offset + place.bytes]
        if place.spec.kind in layout.DATA:
            views.append(layout.lay_out(piece, place.spec.kind, place.spec.shape))
        else:
            views.append(piece.view(place.spec.dtype).view(place.spec.shape))
    return views


def quantize_into_one_buffer(tensors: Sequence[torch.Tensor], quantizers: Sequence[_Quantizer]) -> list[AnyQuantized]:
    """Each tensor by its quantizer, in one buffer. Errors: ValueError if devices differ or the engine does not make a
    quantizer's format."""
    op = "multi_quantize"
    sources = [source_of(op, t).detach() for t in tensors]
    devices = {t.device for t in sources}
    if len(devices) > 1:
        raise ValueError(f"{op}: argument 'tensors' is on {sorted(map(str, devices))}, wanted one device.")
    for quantizer in quantizers:
        if quantizer._python_written or quantizer.storage_class is None:
            raise ValueError(f"{op}: {type(quantizer).__name__} is written in Python, wanted a built-in format.")
    if not sources:
        return []
    places = _places(sources, quantizers)
    parts: list[dict[str, torch.Tensor]] = [{} for _ in sources]
    for place, view in zip(places, _laid_out(places, sources[0].device)):
        parts[place.tensor][place.name] = view
    results = []
    for source, quantizer, fields in zip(sources, quantizers, parts):
        result = quantizer._from_parts(fields, source.shape, source.dtype)
        amax = fields.get(AMAX)
        used = quantizer if amax is None else quantizer._recording(amax.zero_())
        used._write(source, result)
        if amax is not None:
            result._amax = amax
            quantizer._take_note_of(amax)
        results.append(result)
    return results
