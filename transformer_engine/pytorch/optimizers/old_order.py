"""Checkpoints of optimizers by the order of their parameters: before GroupedLinear's order became weight0, bias0,
weight1, ... all weights came first, then all biases. Nothing else of a checkpoint is checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def in_todays_order(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with states in the present order of the parameters. Unchanged unless all of a group's states fit by
    shape in the old order, and not in the present one."""
    states, moved = state_dict["state"], {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        params, numbers = group["params"], saved["params"]
        if len(params) != len(numbers):
            continue
        order, found = _old_order(params), [states.get(number) for number in numbers]
        if not _fit(found, params) and _fit(found, [params[i] for i in order]):
            moved |= {numbers[i]: state for i, state in zip(order, found, strict=True) if state is not None}
    return state_dict | {"state": {**states, **moved}} if moved else state_dict


def _old_order(params: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the parameters, where those of one product's rows (`row_unit`) follow the first of them."""
    blocks: dict[object, list[int]] = {}
    for i, parameter in enumerate(params):
        mark = getattr(parameter, "row_unit", None)
        blocks.setdefault(("single", i) if mark is None else mark[0], []).append(i)
    return [i for block in blocks.values() for i in block]


def _fit(states: Iterable[object], params: Iterable[torch.Tensor]) -> bool:
    for state, parameter in zip(states, params, strict=True):
        values = state.values() if isinstance(state, Mapping) else ()
        tensors = [t for t in values if isinstance(t, torch.Tensor) and t.dim()]
        if any(t.shape != parameter.shape for t in tensors):
            return False
    return True
