"""States that go from torch's Adam and AdamW to FusedAdam and back, and SGD's likewise: training goes on as if the
optimizer were the same."""

import copy

import pytest
import torch
from support import assert_same_bits, refused

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .cases import assert_same, everything, give_grads, parameters

TORCHS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def twins(device, dtype=torch.float32, sizes=(7, 300)):
    return parameters(device, dtype, sizes), parameters(device, dtype, sizes)


def steps(optimizer, count, first=0):
    for step in range(first, first + count):
        give_grads([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


def close(params, others, dtype=torch.float32):
    for p, q in zip(params, others):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-6 if dtype is torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.parametrize("name", TORCHS)
def test_a_run_goes_on_in_fused_adam(device, name):
    ours, theirs = twins(device)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    torchs = TORCHS[name](theirs, **options)
    steps(torchs, 3)
    fused = FusedAdam(ours, lr=7.0, adam_w_mode=name == "AdamW")
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            p.copy_(q)
    saved = torchs.state_dict()
    before = copy.deepcopy(saved)
    fused.load_state_dict(saved)
    torch.testing.assert_close(saved, before, rtol=0, atol=0)
    (group,) = fused.param_groups
    assert (group["lr"], group["betas"], group["step"], group["bias_correction"]) == (1e-2, (0.8, 0.95), 3, True)
    assert not {"foreach", "fused", "amsgrad"} & set(group)
    for p, q in zip(ours, theirs):
        assert_same_bits(fused.state[p]["exp_avg"], torchs.state[q]["exp_avg"])
        assert fused.state[p]["exp_avg"].data_ptr() != torchs.state[q]["exp_avg"].data_ptr()
    steps(fused, 3, first=3), steps(torchs, 3, first=3)
    close(ours, theirs)


@pytest.mark.parametrize("name", TORCHS)
def test_a_run_goes_on_in_torchs(device, name):
    ours, theirs = twins(device)
    fused = FusedAdam(theirs, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, adam_w_mode=name == "AdamW")
    steps(fused, 3)
    torchs = TORCHS[name](ours, lr=7.0)
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            p.copy_(q)
    torchs.load_state_dict(fused.torch_state_dict())
    assert torchs.param_groups[0]["decoupled_weight_decay"] is (name == "AdamW")
    assert [s["step"].item() for s in torchs.state.values()] == [3.0, 3.0]
    before = everything(fused)
    steps(torchs, 3, first=3)
    assert_same(everything(fused), before)
    steps(fused, 3, first=3)
    close(ours, theirs)


@pytest.mark.parametrize("kind", ["masters", "remainders", "float16"])
def test_there_and_back_of_bfloat16_weights(device, kind):
    """torch has no masters: they begin with the weights as they are."""
    options = {"master_weights": True} | (
        {"store_param_remainders": True}
        if kind == "remainders"
        else {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
        if kind == "float16"
        else {}
    )
    ours, theirs = twins(device, torch.bfloat16)
    torchs = torch.optim.AdamW(theirs, lr=1e-2)
    steps(torchs, 2)
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            p.copy_(q)
    fused = FusedAdam(ours, **options)
    fused.load_state_dict(torchs.state_dict())
    for p in ours:
        master = fused.get_unscaled_state(p, "master_param")
        if kind == "remainders":
            assert master.dtype is torch.int16 and not master.any()
        else:
            assert_same_bits(master, p.detach().float())
    back = torch.optim.AdamW(theirs)
    back.load_state_dict(fused.torch_state_dict())
    for q in theirs:
        error = 2**-11 if kind == "float16" else 0.0
        torch.testing.assert_close(back.state[q]["exp_avg"], torchs.state[q]["exp_avg"], rtol=2 * error, atol=1e-9)
    steps(fused, 2, first=2), steps(torchs, 2, first=2)
    close(ours, theirs, torch.bfloat16)


def test_before_the_first_step_and_without_gradients(device):
    ours, theirs = twins(device)
    fused = FusedAdam(ours)
    fused.load_state_dict(torch.optim.AdamW(theirs, lr=0.5).state_dict())
    assert fused.param_groups[0]["lr"] == 0.5 and not fused.state and "step" not in fused.param_groups[0]
    torchs = torch.optim.AdamW(theirs)
    torchs.load_state_dict(fused.torch_state_dict())
    give_grads(theirs[:1])
    torchs.step()
    fused.load_state_dict(torchs.state_dict())
    assert list(fused.state) == ours[:1] and fused.param_groups[0]["step"] == 1


def refusing(device, change, **options):
    ours, theirs = twins(device)
    torchs = torch.optim.AdamW(theirs, weight_decay=0.1)
    steps(torchs, 2)
    saved = torchs.state_dict()
    change(saved)
    fused = FusedAdam(ours, **options)
    steps(fused, 1)
    return fused, saved


BAD = {
    "steps that differ": (
        ValueError,
        ("group 0", "1 to 2 steps", "groups of parameters"),
        lambda s: s["state"][0].update(step=torch.tensor(1.0)),
    ),
    "amsgrad": (NotImplementedError, ("amsgrad", "AMSGrad"), lambda s: s["param_groups"][0].update(amsgrad=True)),
    "maximize": (NotImplementedError, ("maximize",), lambda s: s["param_groups"][0].update(maximize=True)),
    "a moment that is missing": (ValueError, ("exp_avg_sq",), lambda s: s["state"][1].pop("exp_avg_sq")),
    "shape": (ValueError, ("exp_avg", "shape"), lambda s: s["state"][1].update(exp_avg=torch.zeros(3))),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_states_of_torchs_change_nothing(device, name):
    error, words, change = BAD[name]
    fused, saved = refusing(device, change)
    before, groups = everything(fused), copy.deepcopy(fused.state_dict()["param_groups"])
    with refused(error, "FusedAdam.load_state_dict", *words):
        fused.load_state_dict(saved)
    assert_same(everything(fused), before)
    assert fused.state_dict()["param_groups"] == groups


def test_the_other_kind_of_decay(device):
    fused, saved = refusing(device, lambda s: None, adam_w_mode=False)
    with refused(ValueError, "group 0", "AdamW", "adam_w_mode=True"):
        fused.load_state_dict(saved)
    fused = FusedAdam(parameters(device), bias_correction=False)
    with refused(ValueError, "torch_state_dict", "bias_correction=False"):
        fused.torch_state_dict()


def test_sgd_goes_on_in_either(device):
    """FusedSGD's dict has torch's form: either optimizer continues from either dict with the same steps, to a
    rounding."""
    ours, theirs = twins(device)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    torchs, fused = torch.optim.SGD(theirs, **options), FusedSGD(ours, **options)
    steps(torchs, 2), steps(fused, 2)
    one, other = copy.deepcopy(torchs.state_dict()), copy.deepcopy(fused.state_dict())
    fused.load_state_dict(one), torchs.load_state_dict(other)
    steps(torchs, 2, first=2), steps(fused, 2, first=2)
    close(ours, theirs)
