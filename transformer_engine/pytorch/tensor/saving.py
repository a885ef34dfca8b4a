"""Quantized storages through save_for_backward: taken apart into plain tensors, which autograd and saved-tensor hooks
see, and assembled again. Each storage handles its own parts."""

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


def prepare_for_saving(
    *tensors: torch.Tensor | QuantizedTensorStorage | None,
) -> tuple[list[torch.Tensor | None], list[QuantizedTensorStorage | None]]:
    """(plain tensors for save_for_backward, objects that receive them).

    A bare storage gives its parts away and is empty until it is restored. A QuantizedTensor, which may have other
    users, keeps them: another one with the same parts is restored. Plain tensors and None pass through."""
    plain: list[torch.Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            tensor = tensor.detach()
        if not isinstance(tensor, QuantizedTensorStorage):
            plain.append(tensor)
            objects.append(None)
            continue
        parts, restorer = tensor.prepare_for_saving()
        plain += parts
        objects.append(restorer)
    return plain, objects


def restore_from_saved(
    tensors: Sequence[QuantizedTensorStorage | None],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> list[Any] | tuple[list[Any], list[torch.Tensor | None]]:
    """The arguments of prepare_for_saving, assembled again, from its result (objects first). return_saved_tensors: also
    returns the rest of `saved_tensors`. Errors: ValueError if there are too few."""
    rest = list(saved_tensors)
    restored: list[Any] = []
    for restorer in tensors:
        if restorer is not None:
            rest = restorer.restore_from_saved(rest)
            restored.append(restorer)
            continue
        if not rest:
            raise ValueError(
                f"restore_from_saved: argument 'saved_tensors' has {len(saved_tensors)} tensors, wanted all that "
                "prepare_for_saving returned."
            )
        restored.append(rest.pop(0))
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any) -> list[Any]:
    """restore_from_saved with ctx.saved_tensors and ctx.tensor_objects, which is dropped, so that its contents are
    freed with the result."""
    objects = getattr(ctx, "tensor_objects", None)
    if objects is None:
        raise ValueError(
            "restore_from_func_ctx: argument 'ctx' has no tensor_objects: set it to prepare_for_saving's second result "
            "in forward, and restore once."
        )
    ctx.tensor_objects = None
    return restore_from_saved(objects, ctx.saved_tensors)
