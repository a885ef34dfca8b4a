"""Attributes of quantized tensors that do more than hold a value. They are independent of formats."""

from typing import Any

import torch

MARK = "_TE_do_not_offload"  # cpu_offload leaves a tensor with it on its device


class PartField:
    """The attribute of a part. Setting it drops the tensor's engine handle, which would keep the old part alive, copies
    the tensor's mark to the part, and updates the tensors that share the memory."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, storage: Any, owner: type | None = None) -> Any:
        return self if storage is None else storage.__dict__.get(self.name)

    def __set__(self, storage: Any, value: torch.Tensor | None) -> None:
        storage.__dict__[self.name] = value
        storage.__dict__["_handle"] = None
        if storage.__dict__.get("_member") is not None:
            storage._part_set(self.name, value)
        if value is not None and MARK in storage.__dict__:
            setattr(value, MARK, storage.__dict__[MARK])


class MarkField:
    """The mark, as an attribute: setting it on the tensor sets it on each part, also on later ones, because code that
    saves a quantized tensor may see its parts alone."""

    def __get__(self, storage: Any, owner: type | None = None) -> Any:
        if storage is None:
            return self
        if MARK not in storage.__dict__:
            raise AttributeError(f"{type(storage).__name__!r} object has no attribute {MARK!r}")
        return storage.__dict__[MARK]

    def __set__(self, storage: Any, value: object) -> None:
        storage.__dict__[MARK] = value
        for part in storage._tensors().values():
            setattr(part, MARK, value)

    def __delete__(self, storage: Any) -> None:
        del storage.__dict__[MARK]
        for part in storage._tensors().values():
            if hasattr(part, MARK):
                delattr(part, MARK)


def own_attributes(tensor: Any) -> dict[str, object]:
    """Attributes that clients have set: parameters carry marks for distributed training."""
    fields = {*tensor._parts, *tensor._details, *tensor._bookkeeping}
    return {name: value for name, value in tensor.__dict__.items() if name not in fields}
