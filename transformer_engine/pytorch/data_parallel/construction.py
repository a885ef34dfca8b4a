"""The plan of a wrapper: the parameters of a module and their marks, checked, and compared between
the ranks before any memory is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.data_parallel import fp8_weights
from transformer_engine.pytorch.data_parallel.communicator import OP, Communicator
from transformer_engine.pytorch.data_parallel.config import DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.layout import BufferLayout, ParamSpec, buffer_layouts
from transformer_engine.pytorch.distributed.dtensor import is_sharded
from transformer_engine.pytorch.graph.capture.capture import captures_of
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.tensor import QuantizedTensor


class Plan(NamedTuple):
    """The trainable parameters of a module in the order of registration, and where they are to lie."""

    params: list[torch.nn.Parameter]
    names: dict[torch.Tensor, str]
    layouts: list[BufferLayout]


def plan_of(
    module: torch.nn.Module,
    config: DistributedDataParallelConfig,
    dense: Communicator,
    expert: Communicator,
    disable_bucketing: bool,
) -> Plan:
    """The plan, which is the same on all ranks. A ValueError of one rank, or a difference, is raised on all of them."""
    result: list[Plan] = []

    def made() -> list[tuple]:
        names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        params = list(names)
        if not params:
            raise ValueError(f"{OP}: argument 'module' has no trainable parameter, wanted one at least.")
        _check(params, names, config)
        specs = _specs(module, names, config)
        layouts = buffer_layouts(
            specs,
            sharded=config.use_distributed_optimizer,
            ranks=dense.size,
            expert_ranks=expert.size,
            bucket_size=config.bucket_size,
            num_buckets=config.num_buckets,
            one_bucket=disable_bucketing or not config.overlap_grad_reduce,
            high_busbw=config.pad_buckets_for_high_nccl_busbw,
        )
        if not disable_bucketing:
            _check_fp8_buffers(layouts, specs)
        result.append(Plan(params, names, layouts))
        return [("config", str(config)), *((s.name, str((tuple(p.shape), *s[1:6]))) for s, p in zip(specs, params))]

    agree(dense, made)
    return result[0]


def agree(comm: Communicator, describe: Callable[[], list[tuple]]) -> None:
    """Raises ValueError on all ranks where describe() raises on one, or returns different data on two."""
    error: Exception | None = None
    try:
        value: Any = describe()
    except (ValueError, NotImplementedError, TypeError) as raised:
        error, value = raised, f"{type(raised).__name__}: {raised}"
    values = comm.all_gather_object(value)
    if error is not None:
        raise error
    for rank, other in enumerate(values):
        if isinstance(other, str):
            raise ValueError(f"{OP}: rank {rank} of the process group raised {other}")
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(f"{OP}: {_first_difference(values[0], rank, other)}; wanted the same module on each rank.")


def _first_difference(first: list[tuple], rank: int, other: list[tuple]) -> str:
    for (name, what), (its_name, its_what) in zip(first, other):
        if name != its_name:
            return f"rank 0 has parameter '{name}' where rank {rank} has '{its_name}'"
        if what != its_what:
            return f"'{name}' is {what} on rank 0 and {its_what} on rank {rank}"
    return f"rank 0 has {len(first) - 1} parameters and rank {rank} has {len(other) - 1}"


def _check(params: list[torch.nn.Parameter], names: dict, config: DistributedDataParallelConfig) -> None:
    first = params[0]
    for p in params:
        name = names[p]
        if is_sharded(p):
            raise ValueError(f"{OP}: parameter '{name}' is a DTensor, wanted one that is whole on this rank.")
        if p.is_meta:
            raise ValueError(f"{OP}: parameter '{name}' is on meta, wanted one with memory; call to_empty() before.")
        if p.device != first.device:
            raise ValueError(
                f"{OP}: parameter '{name}' is on {p.device} and '{names[first]}' on {first.device}, wanted one device."
            )
        if not isinstance(p, QuantizedTensor) and (p.layout is not torch.strided or not p.dtype.is_floating_point):
            raise ValueError(f"{OP}: parameter '{name}' is {p.dtype}, {p.layout}, wanted a dense one of floats.")
        if fp8_weights.is_fp8(p) and config.use_distributed_optimizer:
            fp8_weights.check_sharded(OP, name, p)
    _check_overlaps(params, names)
    captured = captures_of(params)
    if captured:
        raise ValueError(
            f"{OP}: argument 'module' has parameters that {', '.join(captured)} was captured with, wanted the wrapping "
            "before make_graphed_callables(); call its reset(), wrap, and capture again."
        )


def _check_fp8_buffers(layouts: list[BufferLayout], specs: list[ParamSpec]) -> None:
    """One buffer at most has FP8 weights, whose groups others join; dense parameters and experts apart."""
    first: dict[bool, BufferLayout] = {}
    for layout in layouts:
        if layout.param_dtype is not torch.uint8:
            continue
        other = first.setdefault(layout.expert, layout)
        if other is not layout:
            (one, dtype), (its, its_dtype) = (
                (specs[next(each.slots).param].name, each.grad_dtype) for each in (other, layout)
            )
            raise ValueError(
                f"{OP}: parameters '{one}' and '{its}' are held in FP8 with gradients of {dtype} and {its_dtype}, "
                "wanted one dtype of them; give grad_reduce_in_fp32=True."
            )


def _check_overlaps(params: list[torch.nn.Parameter], names: dict) -> None:
    plain = [p for p in params if not isinstance(p, QuantizedTensor) and p.numel()]
    spans = sorted((p.data_ptr(), _end(p), names[p]) for p in plain)
    for (_, end, name), (begin, _, following) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(
                f"{OP}: parameters '{name}' and '{following}' overlap in memory, wanted memory of their own, or one "
                "parameter under both names."
            )


def _end(p: torch.Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride()))
    return p.data_ptr() + (last + 1) * p.element_size()


def _specs(module: torch.nn.Module, names: dict, config: DistributedDataParallelConfig) -> list[ParamSpec]:
    experts = {p for m in module.modules() if isinstance(m, GroupedLinear) for p in m.parameters(recurse=False)}
    specs = []
    for p, name in names.items():
        unit = None if p in experts else getattr(p, "row_unit", None)
        specs.append(
            ParamSpec(
                name,
                p.numel(),
                torch.uint8 if isinstance(p, QuantizedTensor) else p.dtype,
                torch.float32 if config.grad_reduce_in_fp32 else p.dtype,
                expert=getattr(p, "allreduce", True) is False,
                shared=bool(getattr(p, "shared_embedding", False)),
                unit=None if unit is None else tuple(unit[:2]),
            )
        )
    return specs
