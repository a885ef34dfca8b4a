"""Linear layers over a process group as functions: the computation of Linear(parallel_mode=...) on tensors."""

import functools

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.groups import ranks_of
from transformer_engine.pytorch.functional.linear import Parallel, linear

_COLUMN, _ROW = 1, 2


@functools.lru_cache(maxsize=256)
def _exchange(mode: int, sequence: bool, recompute: bool, ranks: int, name: str) -> _C.GroupTPComm:
    return _C.GroupTPComm(mode, sequence, recompute, ranks, name)


def _linear(
    op: str,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    mode: int,
    sequence: bool,
    recompute: bool,
) -> torch.Tensor:
    if torch.compiler.is_compiling():  # the tracer has a group's size and name, and cannot check it
        group = dist.group.WORLD if group is None else group
        tp_comm = Parallel([mode, int(sequence), int(recompute), group.size()], group.group_name)
        return linear(inp, weight, bias, tp_comm=tp_comm if group.size() > 1 else None)
    ranks = ranks_of(op, "group", group)
    if ranks == 1:
        return linear(inp, weight, bias)
    name = (dist.group.WORLD if group is None else group).group_name
    tp_comm = _exchange(mode, sequence, recompute, ranks, name)
    try:
        return linear(inp, weight, bias, tp_comm=tp_comm)
    except ValueError as error:
        words = str(error).removeprefix("linear: argument 'x' ")
        if words == str(error):
            raise
        raise ValueError(f"{op}: argument 'inp' {words}") from None


def column_linear(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    recompute_allgather: bool = True,
) -> torch.Tensor:
    """inp weight^T + bias for this rank's rows of the weight: its columns of the output.

    Shapes: weight [out / ranks, in], bias [out / ranks]; inp [tokens, ..., in] -> [tokens, ..., out / ranks]; with
    sequence_parallel inp [tokens / ranks, ..., in], which is gathered along dimension 0. Gradients: inp's is the sum
    over the ranks, of this rank's tokens with sequence_parallel; weight's and bias's are of all tokens.
    Saves: inp and weight; recompute_allgather=False: the gathered rows, in place of inp.
    group: None for the default one. A group of one rank communicates nothing.
    Errors: as functional.linear; RuntimeError if the group was destroyed.
    """
    return _linear("column_linear", inp, weight, bias, group, _COLUMN, sequence_parallel, recompute_allgather)


def row_linear(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """The sum over the ranks of inp weight^T, then + bias, for this rank's columns of the weight.

    Shapes: weight [out, in / ranks], bias [out]; inp [tokens, ..., in / ranks] -> [tokens, ..., out]; with
    sequence_parallel [tokens / ranks, ..., out], this rank's tokens: the sum is scattered along dimension 0. 16-bit
    parts are then added in the order of the ranks, in float32, and rounded once. Gradients: bias's covers this rank's
    tokens; distributed.allreduce_sequence_parallel_grads adds these up.
    Saves: inp and weight. group: None for the default one. A group of one rank communicates nothing.
    Errors: as functional.linear; ValueError for tokens that the ranks do not divide.
    """
    return _linear("row_linear", inp, weight, bias, group, _ROW, sequence_parallel, True)
