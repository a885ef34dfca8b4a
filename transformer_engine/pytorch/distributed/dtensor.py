"""This rank's part of a DTensor, and the marks of a parameter. Nothing is communicated here, unless a gradient is cut
in another way than its parameter."""

import sys

import torch


def is_sharded(t: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there are no DTensors
    return module is not None and isinstance(t, module.DTensor)


def local_of(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return t._local_tensor if is_sharded(t) else t


def as_lies(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """local in the form of param: as this rank's part of a DTensor with param's mesh and placements."""
    if not is_sharded(param):
        return local
    mesh, placements = param.device_mesh, param.placements
    return type(param).from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def local_grad(grad: torch.Tensor | None, param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient, cut like param."""
    if is_sharded(grad) and is_sharded(param) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return None if grad is None else local_of(grad)


def marks_of(owner: torch.nn.Module, name: str) -> dict[str, object]:
    """Marks for distributed training (tensor_model_parallel, sequence_parallel, ...) of owner's parameter: its
    attributes, and the module's declarations, because a parameter that FSDP2 made has no marks."""
    return {**getattr(owner, "_tags", {}).get(name, {}), **vars(owner._parameters[name])}
