"""Loaded states whose memory is that of states that are written: exchanged between parameters, the same one twice,
views, those of the group's numbers. As torch.optim.AdamW takes them."""

import copy

import pytest
import torch
from support import assert_same_bits, refused

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .cases import assert_same, everything, give_grads, more_steps, parameters, trained

KINDS = {
    "float32": {},
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "bfloat16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "float16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
}


def dtype_of(kind):
    return torch.bfloat16 if kind in ("masters", "remainders") else torch.float32


def rotated(saved):
    """Each parameter has the state of the next one."""
    keys = list(saved["state"])
    return {**saved, "state": dict(zip(keys, [saved["state"][k] for k in keys[1:] + keys[:1]]))}


@pytest.mark.parametrize("kind", KINDS)
def test_exchanged_states(device, kind):
    """A cycle of three, and the steps after it: with masters a step writes their values."""
    params = parameters(device, dtype_of(kind), sizes=(40, 40, 40))
    optimizer = trained(params, **KINDS[kind])
    wanted = rotated(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(rotated(optimizer.state_dict()))
    for key, state in wanted["state"].items():
        for name, t in state.items():
            assert_same_bits(optimizer.state_dict()["state"][key][name], t, f"{key} {name}")
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fresh = FusedAdam(others, **KINDS[kind])
    fresh.load_state_dict(wanted)
    for each in (optimizer, fresh):
        more_steps(each, 2, first=5)
    assert_same(everything(optimizer), everything(fresh))


def test_exchanged_by_the_groups_order(device):
    """The same by the numbers in param_groups, over groups."""
    params = parameters(device, sizes=(30, 30))
    optimizer = FusedAdam([{"params": [p], "lr": lr} for p, lr in zip(params, (1e-3, 1e-2))])
    give_grads(params)
    optimizer.step()
    saved = optimizer.state_dict()
    wanted = copy.deepcopy([saved["state"][1], saved["state"][0]])
    saved["param_groups"].reverse()
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    for i, p in enumerate(params):
        for name, t in wanted[i].items():
            assert_same_bits(optimizer.state[p][name], t, f"{i} {name}")


VIEWS = {
    "of one storage": lambda s: dict(enumerate({n: t.flip(0) for n, t in s[i].items()} for i in (1, 0))),
    "the same one twice": lambda s: {0: s[1], 1: s[1]},
    "second moments as first": lambda s: {i: dict(zip(s[i], reversed(s[i].values()))) for i in s},
    "rows of the other state": lambda s: {i: {n: t.view(6, 6).t() for n, t in s[1 - i].items()} for i in s},
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_states(device, name):
    shape = (6, 6) if name == "rows of the other state" else (36,)
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(2)]
    optimizer = trained(params)
    saved = optimizer.state_dict()
    given = {**saved, "state": VIEWS[name](saved["state"])}
    wanted = copy.deepcopy(given["state"])
    optimizer.load_state_dict(given)
    for i, p in enumerate(params):
        for state, t in wanted[i].items():
            assert_same_bits(optimizer.state[p][state], t, f"{i} {state}")
    pointers = [t.data_ptr() for p in params for t in optimizer.state[p].values()]
    assert len(set(pointers)) == len(pointers)
    more_steps(optimizer, 1, first=7)


def test_states_that_stay_where_they_are_are_not_copied(device, monkeypatch):
    """A state that is loaded into its own memory costs no clone."""
    optimizer = trained(parameters(device, sizes=(20, 20)))
    before = everything(optimizer)
    monkeypatch.setattr(torch.Tensor, "clone", None)
    optimizer.load_state_dict(optimizer.state_dict())
    monkeypatch.undo()
    assert_same(everything(optimizer), before)


def test_one_state_set_by_a_view_of_it(device):
    optimizer = trained([torch.nn.Parameter(torch.randn(6, 6, device=device))], 1)
    (p,) = optimizer.param_groups[0]["params"]
    for view in (torch.Tensor.t, lambda t: t):
        wanted = view(optimizer.state[p]["exp_avg"]).clone()
        optimizer.set_scaled_state(p, "exp_avg", view(optimizer.state[p]["exp_avg"]))
        assert_same_bits(optimizer.state[p]["exp_avg"], wanted)


def test_a_group_that_joins(device):
    """States of before and of a group that was added, exchanged."""
    params = parameters(device, sizes=(24, 24))
    optimizer = trained(params[:1], 2)
    optimizer.add_param_group({"params": params[1:], "step": 2})
    more_steps(optimizer, 1, first=2)
    saved = optimizer.state_dict()
    wanted = copy.deepcopy(rotated(saved)["state"])
    optimizer.load_state_dict(rotated(saved))
    for i, p in enumerate(params):
        for name, t in wanted[i].items():
            assert_same_bits(optimizer.state[p][name], t, f"{i} {name}")


def test_momentum_that_changes_hands(device):
    params = parameters(device, sizes=(24, 24))
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    give_grads(params)
    optimizer.step()
    wanted = copy.deepcopy(rotated(optimizer.state_dict())["state"])
    optimizer.load_state_dict(rotated(optimizer.state_dict()))
    for i, p in enumerate(params):
        assert_same_bits(optimizer.state[p]["momentum_buffer"], wanted[i]["momentum_buffer"])
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: saved["state"][1], 1: saved["state"][1]}})
    before = [p.detach().clone() for p in params]
    with refused(ValueError, "momentum", "overlap"):
        optimizer.step()
    for p, t in zip(params, before):
        assert_same_bits(p.detach(), t)
