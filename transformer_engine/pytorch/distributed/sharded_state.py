"""State dicts of tensor-parallel modules as DTensors, so that a checkpoint of one number of ranks loads at another. The
marks on a parameter define this rank's part of it; torch's distributed checkpoint saves, reads and reshards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from transformer_engine.pytorch.distributed.dtensor import is_sharded, local_of, marks_of
from transformer_engine.pytorch.distributed.stacked import stacks_of
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

_DIMENSION = "tp"


class _Held(NamedTuple):
    """A parameter as this rank holds it. dim: the dimension along which the ranks' parts are joined, None if each rank
    has all of it; parts: names and sizes along `along` of stacked parts, each of them cut by itself."""

    name: str
    parameter: torch.Tensor
    dim: int | None
    along: int
    parts: dict[str, int]

    def names(self) -> list[str]:
        return [f"{self.name}.{part}" for part in self.parts] if self.parts else [self.name]

    def pieces(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.split(list(self.parts.values()), self.along) if self.parts else (values,)


def tensor_parallel_state_dict(module: torch.nn.Module, mesh: DeviceMesh | None) -> dict[str, Any]:
    """module.state_dict() with its tensor-parallel parameters as DTensors over the mesh: of one dimension, or its
    dimension "tp"; None with one rank and without torch.distributed, which gives the same keys and plain tensors.

    Parameters marked tensor_model_parallel are Shard(partition_dim); all others are equal on every rank and plain. The
    stacked parts of a parameter are separate entries with names of their own, at every number of ranks: the two halves
    of a gated LayerNormMLP's fc1 ("fc1_weight.gate", "fc1_weight.up"), the parts of a MultiheadAttention's fused, not
    interleaved projection ("weight.query", ...), and partition_stride equal parts ("weight.0", ...).
    Each tensor shares the parameter's memory, so that torch.distributed.checkpoint.load(state) writes into the module;
    load_tensor_parallel_state_dict(module, state) afterwards loads the rest: _extra_state, and parameters that FSDP2
    shards, which are gathered here over its mesh (on all of its ranks). Parameters that FSDP2 shards have lost their
    marks: those that this library's modules declare are restored, others must be set again. The scales of delayed
    scaling in _extra_state belong to one rank.
    Errors: TypeError unless they are a module and a mesh; ValueError for a mesh without "tp", or one of another size
    than the module's tp_size; NotImplementedError for quantized parameters.
    """
    op = "tensor_parallel_state_dict"
    tp = _dimension(op, mesh)
    ranks = 1 if tp is None else tp.size()
    held = {h.name: h for h in _held(op, module, ranks)}
    result: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        if key not in held:
            result[key] = value
            continue
        h, values = held[key], value.full_tensor() if is_sharded(value) else value
        for name, piece in zip(h.names(), h.pieces(values), strict=True):
            result[name] = piece if h.dim is None or tp is None else _over(tp, h.dim, piece)
    return result


def load_tensor_parallel_state_dict(module: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """module.load_state_dict of what tensor_parallel_state_dict made of it, or of a module of the same shape on as many
    ranks. Returns and raises as load_state_dict does; also RuntimeError, and nothing is loaded, for one part of a
    parameter without the others, NotImplementedError for quantized parameters."""
    op = "load_tensor_parallel_state_dict"
    plain = dict(state_dict)
    for h in _held(op, module, None):
        present = [key for key in h.names() if key in plain]
        if not present:
            continue
        missing = [key for key in h.names() if key not in plain]
        if missing:
            raise RuntimeError(
                f"{op}: argument 'state_dict' has {present} without {missing}, wanted all parts of '{h.name}'."
            )
        given = [local_of(plain.pop(key)) for key in present]
        plain[h.name] = _assembled(h, given)
    return module.load_state_dict(plain, strict=strict)


def _assembled(h: _Held, given: list[torch.Tensor]) -> torch.Tensor:
    """The parameter's new value from its parts, sharded like the parameter."""
    if not is_sharded(h.parameter):
        own = h.pieces(h.parameter.detach())
        if all(map(_is_same, given, own)):
            return h.parameter.detach()
        return torch.cat(given, h.along) if h.parts else given[0]
    values = torch.cat(given, h.along) if h.parts else given[0]
    if values.shape != h.parameter.shape:
        return values  # load_state_dict raises for them
    from torch.distributed.tensor import distribute_tensor  # its import takes as long as half of torch's

    lies = h.parameter.device_mesh, h.parameter.placements
    return distribute_tensor(values, *lies, src_data_rank=None)


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether they are the same memory."""
    described = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (one, two)]
    return described[0] == described[1]


def _over(mesh: DeviceMesh, dim: int, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def _dimension(op: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{op}: argument 'mesh' is a {type(mesh).__name__}, wanted a DeviceMesh or None; of a group, "
            "DeviceMesh.from_group(group, device_type)."
        )
    if mesh.ndim == 1:
        return mesh
    if _DIMENSION not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"{op}: argument 'mesh' has the dimensions {mesh.mesh_dim_names or mesh.ndim}, wanted one, or one named "
            f"{_DIMENSION!r} among them; give mesh[name]."
        )
    return mesh[_DIMENSION]


# ---- this rank's part ----


def _held(op: str, module: torch.nn.Module, ranks: int | None) -> Iterator[_Held]:
    """Every parameter, under each of its names. ranks: compared with the marks; None: without a comparison."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{op}: argument 'module' is a {type(module).__name__}, wanted a torch.nn.Module.")
    stacked = _stacked(module)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(local_of(parameter), QuantizedTensorStorage):
                raise NotImplementedError(
                    f"{op}: parameter '{name}' is a {type(local_of(parameter)).__name__}, but resharding of quantized "
                    "weights is not available in this version; save their high-precision masters, or dequantize() "
                    "them into a module without quantized_model_init."
                )
            marks = marks_of(owner, leaf)
            dim = marks.get("partition_dim", -1) if marks.get("tensor_model_parallel") else None
            if ranks is not None:
                _check_ranks(op, name, owner, parameter, marks, dim, ranks)
            parts = stacked.get((id(owner), leaf), {})
            if dim is not None and not parts and marks.get("partition_stride", 1) > 1:
                parts = _equal_parts(op, name, parameter.shape[dim], marks["partition_stride"])
            yield _Held(name, parameter, dim, 0 if dim is None else dim, parts)


def divisions_of(module: torch.nn.Module) -> dict[torch.Tensor, tuple[int, tuple[int, ...]] | None]:
    """Of each parameter that is marked tensor_model_parallel: the dimension along which it is divided, and the sizes of
    its parts there, each of which is divided by itself; None if its marks do not define that. A GroupedLinear marks its
    weights at every tp_size: those of one rank are divided only where they belong to experts of this rank."""
    stacked, found = _stacked(module), {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            marks = {} if parameter is None else marks_of(owner, leaf)
            if not marks.get("tensor_model_parallel"):
                continue
            if getattr(owner, "tp_size", None) == 1 and marks.get("allreduce") is not False:
                continue
            dim, count, parts = marks.get("partition_dim", -1), marks.get("partition_stride", 1), None
            if 0 <= dim < parameter.dim():
                size, own = parameter.shape[dim], stacked.get((id(owner), leaf))
                if own:
                    parts = dim, tuple(own.values())
                elif size % count == 0:
                    parts = dim, (size // count,) * count
            found[parameter] = parts
    return found


def _check_ranks(
    op: str,
    name: str,
    owner: torch.nn.Module,
    parameter: torch.Tensor,
    marks: dict[str, Any],
    dim: int | None,
    ranks: int,
) -> None:
    size = getattr(owner, "tp_size", None)
    if dim is not None and not 0 <= dim < parameter.dim():
        raise ValueError(
            f"{op}: parameter '{name}' is marked tensor_model_parallel with partition_dim {dim}, wanted a dimension of "
            f"its shape {list(parameter.shape)}."
        )
    if dim is not None and isinstance(size, int) and size != ranks:
        raise ValueError(
            f"{op}: argument 'mesh' has {ranks} tensor-parallel ranks, but parameter '{name}' is of a "
            f"{type(owner).__name__} with tp_size {size}; give the mesh of its group."
        )
    unsaid = "partition_dim" in marks and getattr(owner, "set_parallel_mode", True) is False
    if dim is None and unsaid and isinstance(size, int) and size > 1:
        raise ValueError(
            f"{op}: parameter '{name}' is of a {type(owner).__name__} with tp_size {size} and without "
            "set_parallel_mode, so its division is undefined; build it with set_parallel_mode=True."
        )


def _equal_parts(op: str, name: str, size: int, count: int) -> dict[str, int]:
    if size % count:
        raise ValueError(
            f"{op}: parameter '{name}' has partition_stride {count}, wanted a divisor of its size {size} along "
            "partition_dim."
        )
    return {str(i): size // count for i in range(count)}


def _stacked(module: torch.nn.Module) -> dict[tuple[int, str], dict[str, int]]:
    """(owner's id, its parameter's name) -> rows of this rank by part, of parameters whose parts are cut one by one."""
    found: dict[tuple[int, str], dict[str, int]] = {}
    for part in module.modules():
        for stack in stacks_of(part):
            for name in stack.parameters:
                parameter = stack.owner._parameters.get(name)
                if parameter is not None:
                    rows = parameter.shape[0] // sum(stack.shares.values())
                    found[id(stack.owner), name] = {part: share * rows for part, share in stack.shares.items()}
    return found
