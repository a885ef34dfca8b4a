"""The engine's calls for quantized tensors: direct for plain tensors, and by the registered ops under tracers and
dispatch modes. Formulas: transformer_engine/quantize.h."""

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import is_in_torch_dispatch_mode
from transformer_engine.pytorch.tensor import layout

# Quantizers of the engine without state between steps: {name: number}.
STATELESS = {name: number for number, (name, _, stateless) in enumerate(_C.quantizer_kinds) if stateless}
_SCALINGS = {name: scaling for name, scaling, _ in _C.quantizer_kinds}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether the engine can use their memory: no tracing, no subclass, no meta tensor."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(t) in _PLAIN and not t.is_meta for t in tensors)


def of_one_version(view: torch.Tensor | None, base: torch.Tensor | None) -> torch.Tensor | None:
    """Makes `view`, of base's memory, share base's version counter: a write to either raises in a backward that saved
    the other. torch does this outside of __torch_dispatch__ only."""
    if view is not None and view is not base and is_plain(view, base):
        _C.share_version(view, base)
    return view


def matrix_of(kind: str, part: torch.Tensor | None) -> torch.Tensor | None:
    """`part` as a matrix that products can read: itself, or a copy."""
    if part is None:
        return None
    found = layout.pitched(kind, part)
    return layout.matrix_of(kind, part) if found is None else of_one_version(found, part)


def quantize(
    quantizer: "_C.Quantizer",
    x: torch.Tensor,
    rowwise: bool,
    columnwise: bool,
    noop: torch.Tensor | None = None,
    out: "_C.Quantized | None" = None,
    amax: torch.Tensor | None = None,
) -> "_C.Quantized":
    """Quantizes x by a built-in quantizer. noop, out: only for plain tensors. amax: float32 [1], the tensor's, if it
    has been computed already (current scaling)."""
    x = x.detach()
    x = x.view(1) if x.dim() == 0 else x
    if is_plain(x):
        return _C.quantize(quantizer, x, rowwise, columnwise, noop, out, amax)
    if quantizer.kind not in STATELESS or amax is not None:
        raise NotImplementedError(
            f"quantize: scaling that keeps a state ({quantizer.kind}) cannot be traced; quantize outside torch.compile."
        )
    outputs = torch.ops.te.quantize(x, quantizer.spec, rowwise, columnwise, False)
    rows, row_scales, columns, column_scales, _ = outputs
    parts = [t if wanted else None for t, wanted in ((rows, rowwise), (row_scales, rowwise))]
    parts += [t if wanted else None for t, wanted in ((columns, columnwise), (column_scales, columnwise))]
    return _C.Quantized(_SCALINGS[quantizer.kind], quantizer.e5m2, *parts)


def dequantize(quantized: "_C.Quantized", dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns], from the rowwise direction if there is one."""
    columnwise = quantized.rowwise is None
    data = quantized.columnwise if columnwise else quantized.rowwise
    scales = quantized.columnwise_scale_inv if columnwise else quantized.rowwise_scale_inv
    if is_plain(data, scales):
        return _C.dequantize(quantized, dtype)
    return torch.ops.te.dequantize(data, scales, quantized.scaling, quantized.e5m2, columnwise, dtype)


def transpose(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of a matrix, transposed, in memory with the pitch that products need: in the columnwise part `out` if
    that is plain and has it."""
    if is_plain(data):
        target = None if out is None or not is_plain(out) else layout.pitched(layout.COLUMNWISE, out)
        return _C.fp8_transpose(data, None if target is None else of_one_version(target, out))
    return layout.empty_data(layout.ROWWISE, data.shape[::-1], data.device).copy_(data.t())


def amax(x: torch.Tensor) -> torch.Tensor:
    """float32 [1]: the largest |x|, NaN left aside."""
    x = x.detach()
    return _C.quantize_amax(x.view(1) if x.dim() == 0 else x)
