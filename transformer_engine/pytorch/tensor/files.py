"""State dictionaries with quantized tensors as plain tensors and a line of text each, for files that hold nothing else
(safetensors), and back. torch.save and torch.distributed.checkpoint do not need it."""

import json
from collections.abc import Mapping

import torch

from transformer_engine.pytorch.tensor import pickling
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

KEY = "transformer_engine.quantized_tensors"


def pack_state_dict(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(plain tensors, text beside them): safetensors.torch.save_file(*pack_state_dict(state)...) takes both.

    A quantized tensor `weight` becomes `weight._data`, `weight._scale_inv`, ...; others stay. Errors: ValueError if two
    names coincide, NotImplementedError for a hybrid tensor."""
    tensors: dict[str, torch.Tensor] = {}
    descriptions = {}
    for key, value in state.items():
        if not isinstance(value, QuantizedTensor):
            parts = {key: value}
        else:
            found, descriptions[key] = pickling.described(value)
            if any(isinstance(t, QuantizedTensorStorage) for t in found.values()):
                raise NotImplementedError(f"pack_state_dict: {key!r} is a {type(value).__name__}, wanted one format.")
            parts = {f"{key}.{name}": t for name, t in found.items()}
        for name, t in parts.items():
            if name in tensors:
                raise ValueError(f"pack_state_dict: two tensors are named {name!r}, wanted one; rename a key.")
            tensors[name] = t
    return tensors, {KEY: json.dumps(descriptions)}


def unpack_state_dict(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> dict[str, torch.Tensor]:
    """The state of pack_state_dict. Errors: ValueError, naming the tensor, for invalid descriptions and for
    descriptions that do not fit the tensors."""
    state = dict(tensors)
    try:
        descriptions = json.loads((metadata or {}).get(KEY, "{}"))
    except ValueError as error:
        raise ValueError(
            f"unpack_state_dict: argument 'metadata' has no readable {KEY}: {error}; wanted pack_state_dict's."
        ) from error
    if not isinstance(descriptions, dict):
        raise ValueError(
            f"unpack_state_dict: argument 'metadata' has {KEY} that is a {type(descriptions).__name__}, wanted the "
            "metadata of pack_state_dict."
        )
    for key, about in descriptions.items():
        prefix = f"{key}."
        parts = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(f"{prefix}_")}
        try:
            state[key] = pickling.rebuilt(parts, about)
        except ValueError as error:
            raise ValueError(f"unpack_state_dict: {key!r}: {error}") from error
        for name in parts:
            del state[prefix + name]
    return state
