"""State dicts of a DistributedOptimizer: the wrapped optimizer's own form, in which the state of a shard is a
FlatShard. No format and no file is made here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from transformer_engine.pytorch.data_parallel.flat_shard import Cut, FlatShard
from transformer_engine.pytorch.data_parallel.shards import OP, Shard, bucket_groups_of
from transformer_engine.pytorch.optimizers.stacked_states import with_stacks

_STEP = "step"


def states_by_parameter(optimizer: Any, *, kept: bool = False) -> dict[torch.Tensor, dict[str, Any]]:
    """Of every parameter that a wrapper holds, also of those without a shard here. kept: as they are in memory, without
    a copy; else as they are saved: states of 8 and 16 bits are float32 then."""
    found: dict[torch.Tensor, dict[str, Any]] = {}
    steps, held, cuts = optimizer._steps, bucket_groups_of(optimizer.ddps), optimizer._cuts
    for number, group in enumerate(optimizer._steps.param_groups):
        local = {shard.param: i for i, shard in enumerate(optimizer._shards[number])}
        for p in filter(held.__contains__, group["params"]):
            if p in local:
                shard = optimizer._shards[number][local[p]]
                state = (steps.kept_of if kept else steps.state_of)(number, local[p])
                found[p] = {name: _as_saved(shard, value, cuts.get(p)) for name, value in state.items()}
            else:
                found[p] = {
                    name: FlatShard(torch.empty(0, dtype=dtype, device=p.device), p.shape, 0, 0, cuts.get(p))
                    if dtype is not None
                    else steps.count_of(p)
                    for name, dtype in steps.names_of(number, p).items()
                }
    return found


def _as_saved(shard: Shard, value: Any, cut: Cut | None) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if not shard.group.is_sharded and cut is None:
        return value.view(shard.param.shape)
    return FlatShard(value, shard.param.shape, shard.start, shard.end, cut)


def state_dict(optimizer: Any) -> dict[str, Any]:
    if (unknown := unknown_cut(optimizer)) is not None:
        raise ValueError(f"{OP}.state_dict: {unknown}")
    number, groups = {}, []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            number.setdefault(p, len(number))
        own = {name: value for name, value in group.items() if name != "params"}
        if optimizer._steps.counts_by_group:
            own[_STEP] = int(optimizer._steps.steps[i])
        groups.append(own | {"params": [number[p] for p in group["params"]]})
    states = {number[p]: state for p, state in states_by_parameter(optimizer).items()}
    return {"state": {i: state for i, state in states.items() if state}, "param_groups": groups}


def unknown_cut(optimizer: Any) -> str | None:
    """Names a parameter of which each tensor-parallel rank has a part, if it is not known which."""
    held = bucket_groups_of(optimizer.ddps)
    for p, cut in optimizer._cuts.items():
        if cut is None and p in held:
            return (
                f"parameter '{held[p].names[p]}' of shape {list(p.shape)} is marked tensor_model_parallel without the "
                "dimension that is divided, wanted its attribute partition_dim, and partition_stride parts that divide "
                "that dimension: a file has the states of the whole parameter."
            )
    return None


def load(optimizer: Any, given: Mapping[str, Any]) -> None:
    op, groups = f"{OP}.load_state_dict", optimizer.param_groups
    given = with_stacks(op, groups, given, partial(_full_tensor, op))
    saved = given["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"{op}: argument 'state_dict' has groups of {[len(group['params']) for group in saved]} parameters, wanted "
            f"{[len(group['params']) for group in groups]}."
        )
    todo, todo_counts = [], []
    for number, (group, its) in enumerate(zip(groups, saved)):
        key_of = dict(zip(group["params"], its["params"]))
        for i, shard in enumerate(optimizer._shards[number]):
            own = optimizer._steps.state_of(number, i)
            state = given["state"].get(key_of[shard.param], {})
            if own and not state:
                raise ValueError(
                    f"{op}: argument 'state_dict' has no state of parameter {key_of[shard.param]!r}, wanted one for "
                    "each parameter."
                )
            for name in own:
                if name not in state:
                    raise ValueError(
                        f"{op}: the state of parameter {key_of[shard.param]!r} has {sorted(state)}, wanted "
                        f"{sorted(own)}."
                    )
                cut = optimizer._cuts.get(shard.param)
                todo.append((number, i, name, _part_of(op, name, shard, cut, own[name], state[name])))
        todo_counts += [
            (p, given["state"][key][_STEP]) for p, key in key_of.items() if _STEP in given["state"].get(key, ())
        ]
    by_group = optimizer._steps.counts_by_group
    counts = [_count_of(op, its, given["state"]) for its in saved] if by_group else []
    for group, its in zip(groups, saved):
        group.update({name: value for name, value in its.items() if name not in ("params", _STEP)})
    for step, count in zip(optimizer._steps.steps, counts):
        step.fill_(count)
    for number, i, name, value in todo:
        optimizer._steps.load_state(number, i, name, value)
    for param, value in todo_counts:
        optimizer._steps.load_count(param, value)
    optimizer.state.update(states_by_parameter(optimizer, kept=True))


def _full_tensor(op: str, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, FlatShard):
        return value
    if value.cut is not None or value.local.numel() != value.shape.numel():
        raise ValueError(
            f"{op}: the state of experts is {value!r}, and their parameters have another form now (one stack, or a "
            "matrix for each), wanted whole states: save with torch.distributed.checkpoint where it was made, and "
            "convert the file with its dcp_to_torch_save."
        )
    return value.local.view(value.shape)


def _count_of(op: str, group: Any, states: Any) -> int:
    """The steps that a saved group has taken. torch's Adam counts them in the state of each parameter."""
    if _STEP in group:
        return int(group[_STEP])
    counts = {int(states[key][_STEP]) for key in group["params"] if _STEP in states.get(key, ())}
    if len(counts) > 1:
        raise ValueError(f"{op}: one group has parameters of {sorted(counts)} steps, wanted one number for all.")
    return counts.pop() if counts else 0


def _part_of(op: str, name: str, shard: Shard, cut: Cut | None, own: Any, given: Any) -> Any:
    """The part of `given` that belongs to the shard, in the shape of the shard's state."""
    if not isinstance(own, torch.Tensor) or not own.dim():
        return given
    if isinstance(given, FlatShard):
        if given.place != (tuple(shard.param.shape), shard.start, shard.end, cut):
            raise ValueError(
                f"{op}: '{name}' is {given!r}, wanted elements {shard.start} to {shard.end} of "
                f"{list(shard.param.shape)}; torch.distributed.checkpoint loads one cut into another."
            )
        return given.local.view(own.shape)
    if not isinstance(given, torch.Tensor) or given.shape != shard.param.shape:
        got = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"{op}: '{name}' is {got}, wanted a tensor of {list(shard.param.shape)}.")
    return given.reshape(-1)[shard.start : shard.end].view(own.shape)
