"""The form in which torch.compile takes a quantized tensor apart and assembles it: its parts, and a context that
compares by value. Called through __tensor_flatten__ and __tensor_unflatten__."""

import torch


class _Settings:
    """A quantizer inside a context. Two are equal if their settings are: its state tensors belong to the module, and a
    context that compared them would be compiled again for each module."""

    def __init__(self, quantizer: object) -> None:
        self.quantizer = quantizer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(tuple(self._settings().items()))

    def __deepcopy__(self, memo: dict) -> "_Settings":
        return self

    def _settings(self) -> dict[str, object]:
        return {} if self.quantizer is None else self.quantizer._plain()


def context(details: dict[str, object], dtype: torch.dtype, requires_grad: bool = False) -> dict[str, object]:
    """The arguments of __tensor_unflatten__ besides the parts and the shape."""
    kept = {name: _Settings(value) if name == "_quantizer" else value for name, value in details.items()}
    return {"details": kept, "dtype": dtype, "requires_grad": requires_grad}


def details_of(context: dict[str, object]) -> dict[str, object]:
    details = context["details"]
    return {name: value.quantizer if isinstance(value, _Settings) else value for name, value in details.items()}
