"""GroupedLinear's parameters come in the API's order, by which optimizers keep their states, and checkpoints of modules
and optimizers from before, which had all weights first, load."""

import copy
import io

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .modules import build, values

ORDER = ["weight0", "bias0", "weight1", "bias1", "weight2", "bias2"]
OLD = sorted(ORDER, key=lambda name: name.startswith("bias"))
OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
    "FusedAdam with masters": lambda params: FusedAdam(params, lr=0.1, master_weights=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
}


def names(module):
    return [name for name, _ in module.named_parameters()]


def in_old_order(module):
    """A module as it was."""
    for name in OLD:
        module._parameters[name] = module._parameters.pop(name)
    return module


def test_parameters_come_in_the_apis_order(device):
    module = build("GroupedLinear", device)
    assert names(module) == ORDER and [k for k in module.state_dict() if k != "_extra_state"] == ORDER
    assert names(build("GroupedLinear without bias", device)) == ORDER[::2]
    for unit, kind in zip(module.row_units(), ("weight", "bias"), strict=True):
        assert unit.names == (f"{kind}0", f"{kind}1", f"{kind}2") and unit.in_order()
    assert names(copy.deepcopy(module)) == names(module.bfloat16()) == names(module.to_empty(device=device)) == ORDER
    with te.quantized_model_init():
        assert names(te.GroupedLinear(3, 32, 32, device=device)) == ORDER


def test_the_same_draws_as_before(device):
    """Memory and initialisation are those of all weights, then all biases."""
    torch.manual_seed(1)
    module = te.GroupedLinear(3, 32, 32, device=device)
    torch.manual_seed(1)
    for i in range(3):
        want = torch.empty(32, 32, device=device).normal_(0, 0.023)
        assert_same_bits(module.get_parameter(f"weight{i}").detach(), want)
    assert module.row_units()[0].in_order()


@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints_of_a_module_from_before(device, whole):
    old, wanted = in_old_order(build("GroupedLinear", device)), values(build("GroupedLinear", device))
    if whole:
        file = io.BytesIO()
        torch.save(old, file)
        file.seek(0)
        module = torch.load(file, weights_only=False)
    else:
        module = build("GroupedLinear", device, seed=1)
        module.load_state_dict(old.state_dict())
    got = values(module)
    assert list(got) == ORDER
    for name in ORDER:
        assert_same_bits(got[name], wanted[name], name)


def step(module, optimizer, seed):
    torch.manual_seed(seed)
    for _, p in sorted(module.named_parameters()):
        p.grad = torch.randn(p.shape).to(p)
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("among", [False, True], ids=["alone", "among others"])
def test_states_of_an_optimizer_from_before(device, kind, among):
    """They go on with the parameters that they are of, to the bit."""

    def model(seed=0):
        dtype = torch.bfloat16 if "masters" in kind else torch.float32
        parts = [build("GroupedLinear", device, dtype=dtype, seed=seed)]
        if among:
            parts = [build("Linear", device, dtype=dtype), *parts, build("split Linear", device, dtype=dtype)]
        return torch.nn.Sequential(*parts)

    def grouped(module):
        return module[1 if among else 0]

    old = model()
    in_old_order(grouped(old))
    optimizer = OPTIMIZERS[kind](old.parameters())
    step(old, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    module = model(1)
    module.load_state_dict(old.state_dict())
    again = OPTIMIZERS[kind](module.parameters())
    before = copy.deepcopy(saved)
    again.load_state_dict(saved)
    assert str(saved) == str(before)  # the caller's dict is as it was
    step(old, optimizer, 2)
    step(module, again, 2)
    for (name, p), (_, q) in zip(sorted(old.named_parameters()), sorted(module.named_parameters()), strict=True):
        assert_same_bits(p.detach(), q.detach(), name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_today_stay_where_they_are(device, kind):
    module = build("GroupedLinear", device)
    optimizer = OPTIMIZERS[kind](module.parameters())
    step(module, optimizer, 1)
    other = copy.deepcopy(module)
    again = OPTIMIZERS[kind](other.parameters())
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert_same_bits(again.state[q][key], value, key)


def test_what_fits_in_neither_order_is_refused(device):
    module = build("GroupedLinear", device)
    optimizer = FusedAdam(module.parameters())
    step(module, optimizer, 1)
    saved = optimizer.state_dict()
    saved["state"] = {i: saved["state"][5 - i] for i in range(6)}
    before = {name: t.clone() for name, t in optimizer.state[module.weight1].items()}
    with refused(ValueError, "FusedAdam"):
        optimizer.load_state_dict(saved)
    for name, t in before.items():
        assert_same_bits(optimizer.state[module.weight1][name], t, name)
