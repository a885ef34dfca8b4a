"""The collectives of tensor and sequence parallelism along the first dimension, by torch.distributed: nothing is
coalesced or differentiated here, and quantized.py handles quantized tensors."""

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
from transformer_engine.pytorch.distributed.quantized import gather_quantized
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage

Work = object  # torch.distributed's result with async_op: call wait() on it before the result is read


def _check(op: str, inp: torch.Tensor, group: object | None) -> None:
    check_device(op, "inp", inp, group)
    check_agreement(op, inp, group)


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
    quantizer: Quantizer | None = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[torch.Tensor, Work | None]:
    """Every rank's inp, joined in the order of the ranks.

    quantizer: the result is the quantized tensor that it would make of the joined values, byte for byte, in the
    directions of its usages; the same holds for an inp that is already quantized, in its own directions without a
    quantizer. FP8 data and scales are sent: with one scale a tensor (current scaling first agrees on the largest amax
    of the group, delayed scaling has the same scale on every rank), and with blocks if a rank's rows are a multiple of
    128, or 1x128 blocks rowwise alone. Otherwise, and for quantizers of other formats, the values are sent and
    quantized afterwards. If FP8 data are sent, a quantizer records the amax of its own rank's values.
    Shapes: inp [n, ...] -> [ranks * n, ...]; with one rank inp itself, unless output_tensor or quantizer is given.
    Returns (gathered, work); work is None unless async_op, and the result is valid after work.wait(). No gradient.
    Errors: NotImplementedError for external_coalescing, for output_tensor together with quantized data and for a
    quantized inp of another format; ValueError for an output that does not fit, for a quantized inp whose scales differ
    between the ranks or whose blocks would span two of them, or that the quantizer does not make.
    """
    op = "gather_along_first_dim"
    if external_coalescing:
        raise NotImplementedError(
            f"{op}: argument 'external_coalescing' is {external_coalescing!r}, but coalesced gathers are not available "
            "in this version; leave 'external_coalescing' at its default."
        )
    quantized = isinstance(inp, QuantizedTensorStorage)
    if not quantized:
        check_plain(op, inp)
    ranks = ranks_of(op, "process_group", process_group)
    if quantized or quantizer is not None:
        if output_tensor is not None:
            raise NotImplementedError(
                f"{op}: argument 'output_tensor' is given, but gathering quantized data into a given tensor is not "
                "available in this version; leave 'output_tensor' at its default."
            )
        gathered, work = gather_quantized(op, inp, process_group, ranks, quantizer)
        if async_op and ranks > 1:
            return gathered, work
        work.wait()
        return gathered, None
    if ranks == 1 and output_tensor is None:
        return inp, None
    if ranks > 1:
        _check(op, inp, process_group)
    out = _out(op, "output_tensor", output_tensor, inp, ranks * inp.shape[0])
    if ranks == 1:
        return out.copy_(inp), None
    if torch.compiler.is_compiling() and not async_op:
        gathered = gathered_traced(inp, process_group)
        return (gathered if output_tensor is None else out.copy_(gathered)), None
    if async_op:
        return out, dist.all_gather_into_tensor(out, inp.contiguous(), group=process_group, async_op=True)
    post_gather(inp, process_group)
    with enqueue_guard(process_group, inp.device):
        return out, dist.all_gather_into_tensor(out, inp.contiguous(), group=process_group)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: object | None, async_op: bool = False, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, Work | None]:
    """This rank's rows of the sum of every rank's inp.

    Shapes: inp [ranks * n, ...] -> [n, ...]; with one rank inp itself, unless output is given.
    Returns (sum, work) as gather_along_first_dim. Errors: ValueError if ranks does not divide the rows.
    """
    op = "reduce_scatter_along_first_dim"
    check_plain(op, inp)
    ranks = ranks_of(op, "tp_group", tp_group)
    if ranks == 1 and output is None:
        return inp, None
    if ranks > 1:
        _check(op, inp, tp_group)
    check_divides(op, inp, ranks)
    out = _out(op, "output", output, inp, inp.shape[0] // ranks)
    if ranks == 1:
        return out.copy_(inp), None
    return out, dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group, async_op=async_op)


def allreduce(
    inp: torch.Tensor, tp_group: object | None = None, async_op: bool = False
) -> tuple[torch.Tensor, Work | None]:
    """The sum of every rank's inp, written into inp, which is returned.

    Returns (inp, work) as gather_along_first_dim.
    """
    op = "allreduce"
    check_plain(op, inp, dims=0)
    if ranks_of(op, "tp_group", tp_group) == 1:
        return inp, None
    _check(op, inp, tp_group)
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)
