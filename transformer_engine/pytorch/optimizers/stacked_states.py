"""States of optimizers of MoEMLP's experts, which are one stack for each product, or a matrix for each expert (in files
from before there were stacks, and where weights are held in FP8): those of one form become those of the other. All
matrices of a stack have the same count of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def with_stacks(
    op: str,
    param_groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    full_tensor: Callable[[torch.Tensor], torch.Tensor] = _itself,
) -> Mapping[str, Any]:
    """`state_dict` with a state for each parameter among the groups: for a stack (a parameter marked `stacked`) where
    there are states of its matrices, for matrices where there is one of their stack. Unchanged where the numbers of
    parameters do not tell of such states. full_tensor: of a saved state, the tensor with all of its elements.
    States of matrices are joined in the order of their names' numbers, without names in their own order. Errors:
    ValueError for states of one stack that cannot be joined."""
    saved_groups, states = state_dict["param_groups"], dict(state_dict["state"])
    if len(saved_groups) != len(param_groups):
        return state_dict
    groups, changed = [], False
    for group, saved in zip(param_groups, saved_groups):
        numbers = list(saved["params"])
        parts = _joins(group["params"], numbers, states) or _splits(group["params"], numbers, states)
        if not parts:
            groups.append(saved)
            continue
        changed, new = True, []
        names = dict(zip(numbers, saved.get("param_names", numbers)))
        for params, its in parts:
            if len(params) == len(its) and not _differs(params[0], states.get(its[0])):
                new += its
                continue
            if _is_stack(params[0]):
                its = _numbered(op, its, names)
            found = [states.pop(number, None) for number in its]
            if _is_stack(params[0]):
                joined = _joined(f"{op}: states of parameters {its}", params[0], found, full_tensor)
                states |= {} if joined is None else {its[0]: joined}
                new.append(its[0])
            else:
                each = [(its[0], i) for i in range(len(params))]
                states |= dict(zip(each, _divided(found[0], len(params), full_tensor), strict=True)) if found[0] else {}
                new += each
        kept = {name: value for name, value in saved.items() if name != "param_names"}  # the group has its own
        groups.append({**kept, "params": new})
    return {**state_dict, "state": states, "param_groups": groups} if changed else state_dict


_Parts = list[tuple[Sequence[torch.Tensor], Sequence[Any]]]  # parameters, and the numbers of their states


def _joins(params: Sequence[torch.Tensor], numbers: Sequence[Any], states: Mapping[Any, Any]) -> _Parts:
    """Where there is a number for each matrix of each stack, and one at least that is joined."""
    counts = [p.shape[0] if _is_stack(p) else 1 for p in params]
    if len(numbers) != sum(counts) or not any(map(_is_stack, params)):
        return []
    parts, first = [], 0
    for p, count in zip(params, counts):
        parts.append(([p], numbers[first : first + count]))
        first += count
    joins = (len(its) > 1 or (_is_stack(of[0]) and _differs(of[0], states.get(its[0]))) for of, its in parts)
    return parts if any(joins) else []


def _splits(params: Sequence[torch.Tensor], numbers: Sequence[Any], states: Mapping[Any, Any]) -> _Parts:
    """Where there is a number for each stack, and a parameter for each of its matrices."""
    parts, first, empty = [], 0, not any(states.get(number) for number in numbers)
    for number in numbers:
        if first == len(params):
            return []
        count = _matrices_from(params, first)
        count = count if empty or _has_shape(states.get(number), (count, *params[first].shape)) else 1
        parts.append((params[first : first + count], [number]))
        first += count
    splits = (len(of) > 1 or (not _is_stack(of[0]) and _differs(of[0], states.get(its[0]))) for of, its in parts)
    return parts if first == len(params) and any(splits) else []


def _numbered(op: str, its: Sequence[Any], names: Mapping[Any, object]) -> Sequence[Any]:
    """The numbers of a stack's matrices in the order of their names, if the file has names: parameters that a client
    sorted by name are weight0, weight1, weight10, weight11, weight2, ..."""
    found = {names[number]: number for number in its}
    stem = str(next(iter(found))).rstrip("0123456789")
    if not stem:  # no name, but a number, which is a word in some files
        return its
    wanted = [f"{stem}{i}" for i in range(len(its))]
    if set(found) != set(wanted):
        raise ValueError(
            f"{op}: the matrices of one stack have the names {', '.join(map(str, found))} in 'param_names', wanted "
            f"{wanted[0]} to {wanted[-1]}, in any order; give the optimizer its parameters in the order of the file."
        )
    return [found[name] for name in wanted]


def _is_stack(p: torch.Tensor) -> bool:
    return getattr(p, "stacked", False) is True and p.dim() == 3


def _differs(p: torch.Tensor, state: object) -> bool:
    """Whether p is a stack of one matrix and the state the matrix's, or the other way round."""
    return _has_shape(state, p.shape[1:] if _is_stack(p) else (1, *p.shape))


def _matrices_from(params: Sequence[torch.Tensor], first: int) -> int:
    """The number of parameters from there on that are the rows of one product (`row_unit`), all of it."""
    unit, _, count = getattr(params[first], "row_unit", (None, 0, 1))
    found = [getattr(p, "row_unit", None) for p in params[first : first + count]]
    return count if found == [(unit, i, count) for i in range(count)] else 1


def _has_shape(state: object, shape: Sequence[int]) -> bool:
    values = state.values() if isinstance(state, Mapping) else ()
    shapes = [tuple(t.shape) for t in values if isinstance(t, torch.Tensor) and t.dim()]
    return len(shapes) > 0 and all(found == tuple(shape) for found in shapes)


def _divided(state: Mapping[str, Any], count: int, full_tensor: Callable[[torch.Tensor], torch.Tensor]) -> list[dict]:
    """Of a stack's state, that of each matrix."""
    of_all = {
        name: full_tensor(t).unbind(0) if isinstance(t, torch.Tensor) and t.dim() else t for name, t in state.items()
    }
    return [{name: t[i] if isinstance(t, tuple) else t for name, t in of_all.items()} for i in range(count)]


def _joined(
    where: str, stack: torch.Tensor, states: Sequence[Any], full_tensor: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any] | None:
    """The stack's state; None where no matrix has one."""
    if not any(states):
        return None
    what = f"{where}, the matrices of one stack {list(stack.shape)}"
    if not all(states) or len({frozenset(state) for state in states}) > 1:
        raise ValueError(f"{what}: {_described(states)}, wanted the same for all of them.")
    joined: dict[str, Any] = {}
    for name in states[0]:
        values = [state[name] for state in states]
        if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
            parts = [full_tensor(value) for value in values]
            kinds = {(part.dtype, part.device, tuple(part.shape)) for part in parts}
            if len(kinds) > 1 or parts[0].shape != stack.shape[1:]:
                got = [f"{dtype} {list(shape)} on {device}" for dtype, device, shape in kinds]
                raise ValueError(f"{what}: '{name}' is {', '.join(got)}, wanted {list(stack.shape[1:])} of one dtype.")
            joined[name] = torch.stack(parts)
            continue
        numbers = {None if value is None else float(value) for value in values}
        if len(numbers) > 1:
            raise ValueError(
                f"{what}: '{name}' is {', '.join(map(str, numbers))}, wanted one number for all: a stack is stepped as "
                "one parameter."
            )
        joined[name] = values[0]
    return joined


def _described(states: Sequence[Any]) -> str:
    kinds = sorted({str(sorted(state)) if state else "none" for state in states})
    return f"they have {' and '.join(kinds)}"
