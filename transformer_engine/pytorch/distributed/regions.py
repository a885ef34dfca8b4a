"""Differentiable collectives along the first dimension: the borders of the regions in which each rank has its own
tokens, or its own part of a sum. Each is linear, so that none saves a tensor for its backward. Nothing is overlapped or
quantized here: modules do that themselves."""

from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.distributed.groups import (
    check_agreement,
    check_device,
    check_divides,
    check_plain,
    enqueue_guard,
    gathered_traced,
    post_gather,
    ranks_of,
)

# In a trace, a collective that writes into a tensor silently loses the gradient of its input; those of
# dist._functional_collectives do not. torch.compile imports them: here they would be a sixth of the package's import.
# Their gather ends the process over gloo on CUDA (it reads device addresses on the host): gathered_traced does not.


def _gathered(rows: torch.Tensor, group: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return gathered_traced(rows, group)
    out = rows.new_empty((dist.get_world_size(group) * rows.shape[0], *rows.shape[1:]))
    post_gather(rows, group)
    with enqueue_guard(group, rows.device):
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def _scattered_sum(full: torch.Tensor, group: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return dist._functional_collectives.reduce_scatter_tensor(full.contiguous(), "sum", 0, group)
    out = full.new_empty((full.shape[0] // dist.get_world_size(group), *full.shape[1:]))
    with enqueue_guard(group, full.device):
        dist.reduce_scatter_tensor(out, full.contiguous(), group=group)
    return out


def _own_rows(full: torch.Tensor, group: Any) -> torch.Tensor:
    rows = full.shape[0] // dist.get_world_size(group)
    return full.narrow(0, dist.get_rank(group) * rows, rows).clone(memory_format=torch.contiguous_format)


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return dist._functional_collectives.all_reduce(part.contiguous(), "sum", group)
    out = part.clone(memory_format=torch.contiguous_format)  # a gradient may be shared, or have stride 0
    with enqueue_guard(group, out.device):
        dist.all_reduce(out, group=group)
    return out


def _same(full: torch.Tensor, group: Any) -> torch.Tensor:
    return full.view_as(full)


# name: (the operation, the name of its gradient's operation): one of them, so that it can be differentiated again.
# gather_of_one: every rank reads the same tensor, whose gradient is the same everywhere, not a part.
_WAYS = {
    "gather": (_gathered, "reduce_scatter"),
    "reduce_scatter": (_scattered_sum, "gather"),
    "scatter": (_own_rows, "gather_of_one"),
    "gather_of_one": (_gathered, "scatter"),
    "reduce": (_summed, "copy"),
    "copy": (_same, "reduce"),
}


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, group: Any, way: str) -> torch.Tensor:
        does, back = _WAYS[way]
        ctx.group, ctx.back = group, back
        return does(inp, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Region.apply(grad, ctx.group, ctx.back), None, None


def _run(
    op: str,
    way: str,
    inp: torch.Tensor,
    group: object | None,
    dims: int = 1,
    divides: bool = False,
) -> torch.Tensor:
    check_plain(op, inp, dims)
    ranks = ranks_of(op, "group", group)
    if ranks == 1:
        return inp
    check_device(op, "inp", inp, group)
    check_agreement(op, inp, group)
    if divides:
        check_divides(op, inp, ranks)
    return _Region.apply(inp, dist.group.WORLD if group is None else group, way)


def gather_from_sequence_parallel_region(inp: torch.Tensor, group: object | None = None) -> torch.Tensor:
    """Every rank's rows, joined in the order of the ranks; in the backward, each rank gets its rows of the sum of the
    ranks' gradients. For a tensor that each rank then uses in a part of a computation of its own.

    Shapes: inp [n, ...] -> [ranks * n, ...]; in a group of 1 inp itself, as in all of these.
    Errors, as in all of these: TypeError and ValueError for an inp that is not a plain tensor or is on a device that
    the group has no backend for, RuntimeError for a group that has been destroyed; on the CPU and over gloo, the same
    ValueError on every rank if shapes or dtypes differ between them.
    """
    return _run("gather_from_sequence_parallel_region", "gather", inp, group)


def reduce_scatter_to_sequence_parallel_region(inp: torch.Tensor, group: object | None = None) -> torch.Tensor:
    """This rank's rows of the sum of every rank's inp; in the backward, the gradients of all rows, gathered.

    Shapes: inp [ranks * n, ...] -> [n, ...]. Errors: ValueError if ranks does not divide the rows.
    """
    return _run("reduce_scatter_to_sequence_parallel_region", "reduce_scatter", inp, group, divides=True)


def scatter_to_sequence_parallel_region(inp: torch.Tensor, group: object | None = None) -> torch.Tensor:
    """This rank's rows of inp, which is the same on every rank; in the backward, the gradients of all rows, gathered.

    Shapes: inp [ranks * n, ...] -> [n, ...], in memory of its own. Errors: ValueError if ranks does not divide the
    rows.
    """
    return _run("scatter_to_sequence_parallel_region", "scatter", inp, group, divides=True)


def reduce_from_tensor_model_parallel_region(inp: torch.Tensor, group: object | None = None) -> torch.Tensor:
    """The sum of every rank's inp, in memory of its own; in the backward, the unchanged gradient, which is the same on
    every rank. For the parts of a product that the ranks have computed."""
    return _run("reduce_from_tensor_model_parallel_region", "reduce", inp, group, dims=0)


def copy_to_tensor_model_parallel_region(inp: torch.Tensor, group: object | None = None) -> torch.Tensor:
    """inp unchanged, the same on every rank; in the backward, the sum of every rank's gradient. For a tensor that each
    rank then uses in a part of a computation of its own."""
    return _run("copy_to_tensor_model_parallel_region", "copy", inp, group, dims=0)


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.ops.te.group_sum(grad.contiguous(), ctx.group, ctx.ranks), None, None


def add_up_gradient(parameter: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """As copy_to_tensor_model_parallel_region, for modules: the group by its name, under torch.compile too, and without
    a comparison of the ranks."""
    return _AddUp.apply(parameter, group, ranks)


class _GatherByName(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
        ctx.group, ctx.ranks = group, ranks
        return torch.ops.te.group_gather(rows, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = torch.ops.te.group_exchange(grad.contiguous(), ctx.group, ctx.ranks)
        return torch.ops.te.comm_ordered_sum(parts, None), None, None


def gather_by_name(rows: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """As gather_from_sequence_parallel_region, for modules: the group by its name, under torch.compile too. Gradients
    are added up in the order of the ranks, in float32, and rounded once."""
    return _GatherByName.apply(rows, group, ranks)
