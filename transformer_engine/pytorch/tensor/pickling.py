"""Quantized tensors as plain tensors with a plain description, and back: the form in pickles, in torch.save's files
under weights_only, and in files of plain tensors. Everything from a file is checked before a tensor is made of it."""

from collections.abc import Mapping
from typing import Any

import torch

from transformer_engine.pytorch.tensor.fields import own_attributes
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE
from transformer_engine.pytorch.tensor.registry import FLOATS, FORMATS, QUANTIZERS, AnyQuantized

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def described(storage: AnyQuantized) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(its parts in memory of their own size, everything else as numbers and names). A columnwise direction that can be
    derived is left out, and recomputed."""
    storage._must_hold_data("save")
    usages = storage.get_usages()
    kept = storage._twin()
    if all(usages.values()) and kept._derivable():
        kept.update_usage(columnwise_usage=False)
    parts = {}
    for name, t in kept._tensors().items():
        t = t.detach()
        if isinstance(t, AnyQuantized):
            parts[name] = t
            continue
        owns_storage = t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
        parts[name] = t if owns_storage else t.clone(memory_format=torch.contiguous_format)
    quantizer = getattr(storage, "_quantizer", None)
    about = {
        "class": type(storage).__name__,
        "shape": list(storage.size()),
        "dtype": _NAMES[storage.dtype],
        "usages": usages,
        "details": {n: _plain(getattr(storage, n)) for n in storage._details if n != "_quantizer"},
        "quantizer": None if quantizer is None or not quantizer._rebuildable() else quantizer._plain(),
    }
    return parts, about


def _plain(value: object) -> object:
    return value if isinstance(value, bool) else int(value)


def rebuilt(parts: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> AnyQuantized:
    """The tensor of a description by `described`. Errors: ValueError naming the class, the field and the wanted
    value."""
    if not isinstance(about, Mapping) or not isinstance(parts, Mapping):
        raise ValueError("a quantized tensor in a file: its description is not a dictionary.")
    name = about.get("class")
    cls = FORMATS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"a quantized tensor in a file: its class is {name!r}, wanted one of {sorted(FORMATS)}.")
    shape = _field(cls, about, "shape", lambda v: isinstance(v, (list, tuple)) and all(_is_size(n) for n in v))
    dtype = _DTYPES[_field(cls, about, "dtype", lambda v: v in _DTYPES)]
    usages = _field(cls, about, "usages", lambda v: isinstance(v, Mapping) and set(v) == set(DATA))
    details = _field(cls, about, "details", lambda v: isinstance(v, Mapping))
    details = cls._checked_details(details)
    cls._checked_parts(parts, tuple(shape), details)
    details["_quantizer"] = _quantizer_of(about.get("quantizer"))
    fields = {part.argument: parts.get(n) for n, part in cls._parts.items()}
    fields |= {argument: details[n] for n, argument in cls._details.items()}
    if issubclass(cls, torch.Tensor):
        result = cls(shape=torch.Size(shape), dtype=dtype, **fields)
    else:
        result = cls(**fields, fake_dtype=dtype)
    if usages[ROWWISE] and usages[COLUMNWISE]:
        result.update_usage(columnwise_usage=True)
    return result


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**48


def _field(cls: type, about: Mapping[str, Any], name: str, fits: Any) -> Any:
    value = about.get(name)
    try:
        good = fits(value)
    except TypeError:
        good = False
    if not good:
        raise ValueError(f"{cls.__name__} in a file: its {name} is {value!r:.100}.")
    return value


def _quantizer_of(plain: object) -> Any:
    if plain is None:
        return None
    name = plain.get("class") if isinstance(plain, Mapping) else None
    cls = QUANTIZERS.get(name) if isinstance(name, str) else None
    if cls is None or not cls._in_files:
        known = [name for name, cls in QUANTIZERS.items() if cls._in_files]
        raise ValueError(f"a quantizer in a file: it is {plain!r:.200}, wanted one of {known}.")
    return cls._from_plain(plain)


def rebuilt_tensor(
    parts: Mapping[str, torch.Tensor],
    about: Mapping[str, Any],
    requires_grad: bool,
    parameter: bool,
    attributes: Mapping[str, Any],
) -> AnyQuantized:
    """Pickle calls it."""
    result = rebuilt(parts, about)
    if isinstance(result, torch.Tensor):
        result.requires_grad_(bool(requires_grad))
        if parameter:
            result._is_param = True
        result.__setstate__(attributes)
    return result


def reduced(storage: AnyQuantized) -> tuple:
    """For __reduce_ex__: names, numbers and plain tensors, so that weights_only loads it."""
    parts, about = described(storage)
    if not isinstance(storage, torch.Tensor):
        return rebuilt_tensor, (parts, about, False, False, {})
    attributes = own_attributes(storage)
    parameter = bool(attributes.pop("_is_param", False))
    plain = {n: v for n, v in attributes.items() if isinstance(v, (bool, int, float, str)) or type(v) is torch.Tensor}
    others = {n: v for n, v in attributes.items() if n not in plain}  # may refer to the tensor, and are code
    return rebuilt_tensor, (parts, about, storage.requires_grad, parameter, plain), others or None


torch.serialization.add_safe_globals([rebuilt_tensor])
