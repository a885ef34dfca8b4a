"""The collectives of tensor and sequence parallelism along the first dimension. Plain torch.distributed: nothing is
quantized, coalesced or differentiated here."""

import torch
import torch.distributed as dist

from transformer_engine.pytorch.module.arguments import check_tensor

Work = object  # what torch.distributed returns with async_op: call wait() on it before the result is read


def _ranks(group: object | None) -> int:
    """1 where torch.distributed has not been initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _check_rows(op: str, inp: torch.Tensor) -> None:
    check_tensor(op, "inp", inp)
    if inp.dim() == 0:
        raise ValueError(f"{op}: argument 'inp' has no dimensions, wanted at least one.")


def _out(op: str, argument: str, given: torch.Tensor | None, inp: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor for the result: a new one, or the given one if it fits."""
    shape = (rows, *inp.shape[1:])
    if given is None:
        return torch.empty(shape, dtype=inp.dtype, device=inp.device)
    got = tuple(given.shape), given.dtype, given.device, given.is_contiguous()
    if got != (shape, inp.dtype, inp.device, True):
        raise ValueError(
            f"{op}: argument '{argument}' has shape {got[0]}, dtype {got[1]}, device {got[2]}, contiguous {got[3]}; "
            f"wanted a contiguous tensor of shape {shape}, dtype {inp.dtype}, device {inp.device}."
        )
    return given


def gather_along_first_dim(
    inp: torch.Tensor,
    process_group: object | None,
    async_op: bool = False,
    quantizer: object | None = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[torch.Tensor, Work | None]:
    """Every rank's inp, one behind the other in the order of the ranks.

    Shapes: inp [n, ...] -> [ranks * n, ...]; with one rank inp itself, unless output_tensor is given.
    Returns (gathered, work); work is None unless async_op, and the result is there after work.wait().
    Errors: NotImplementedError for quantizer and external_coalescing; ValueError for an output that does not fit.
    """
    op = "gather_along_first_dim"
    for name, value in (("quantizer", quantizer), ("external_coalescing", external_coalescing)):
        if value:
            raise NotImplementedError(
                f"{op}: argument '{name}' is {value!r}, but quantized and coalesced gathers are not available in this "
                f"version; leave '{name}' at its default."
            )
    _check_rows(op, inp)
    ranks = _ranks(process_group)
    if ranks == 1 and output_tensor is None:
        return inp, None
    out = _out(op, "output_tensor", output_tensor, inp, ranks * inp.shape[0])
    if ranks == 1:
        return out.copy_(inp), None
    return out, dist.all_gather_into_tensor(out, inp.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: object | None, async_op: bool = False, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, Work | None]:
    """This rank's rows of the sum of every rank's inp.

    Shapes: inp [ranks * n, ...] -> [n, ...]; with one rank inp itself, unless output is given.
    Returns (sum, work) as gather_along_first_dim. Errors: ValueError where ranks does not divide the rows.
    """
    op = "reduce_scatter_along_first_dim"
    _check_rows(op, inp)
    ranks = _ranks(tp_group)
    if inp.shape[0] % ranks:
        raise ValueError(
            f"{op}: argument 'inp' has {inp.shape[0]} rows, wanted a multiple of the group's {ranks} ranks; pad it."
        )
    if ranks == 1 and output is None:
        return inp, None
    out = _out(op, "output", output, inp, inp.shape[0] // ranks)
    if ranks == 1:
        return out.copy_(inp), None
    return out, dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group, async_op=async_op)


def allreduce(
    inp: torch.Tensor, tp_group: object | None = None, async_op: bool = False
) -> tuple[torch.Tensor, Work | None]:
    """The sum of every rank's inp, written into inp (which the result is).

    Returns (inp, work) as gather_along_first_dim.
    """
    check_tensor("allreduce", "inp", inp)
    if _ranks(tp_group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)
