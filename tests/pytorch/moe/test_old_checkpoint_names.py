# Names in checkpoints from when each expert of a MoEMLP had a parameter: states of an optimizer go to the experts that
# their names tell, whatever their order, and what would load no weight is refused.
import io

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .cases import BF16, EXPERTS, FFN, HIDDEN, TOPK, as_before, build, in_todays_names

pytestmark = pytest.mark.usefixtures("fp8_left_off")
MANY = 12  # of which sorted names are in another order than numbers
NAMES = [f"experts.fc{k}.weight" for k in (1, 2)]
ORDERS = {"sorted": sorted, "reversed": lambda named: list(named)[::-1]}


def many(device, seed):
    torch.manual_seed(seed)
    return te.MoEMLP(HIDDEN, FFN, MANY, TOPK, params_dtype=BF16, device=device)


def train(module, optimizer, seed):
    """A step with the same gradients for the same elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"router.weight": (MANY, HIDDEN), NAMES[0]: (MANY, 2 * FFN, HIDDEN), NAMES[1]: (MANY, HIDDEN, FFN)}
    grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, p in module.named_parameters():
        stack = name.rstrip("0123456789")
        p.grad = (grads[stack] if name in grads else grads[stack][int(name[len(stack) :])]).to(p)
    optimizer.step()


def states_of(optimizer):
    """Through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("named", ["named", "under their names"])
@pytest.mark.parametrize("order", ORDERS)
def test_states_of_parameters_in_another_order(order, named, device):
    """torch.distributed.checkpoint saves states under the names of the parameters."""
    old, ours = as_before(many(device, 0)), many(device, 1)
    first, second = (FusedAdam(ORDERS[order](m.named_parameters()), lr=0.1) for m in (old, ours))
    train(old, first, 0)
    ours.load_state_dict(old.state_dict())
    state = states_of(first)
    if named == "under their names":
        (group,) = state["param_groups"]
        name_of = dict(zip(group["params"], group.pop("param_names"), strict=True))
        group["params"] = [name_of[number] for number in group["params"]]
        state["state"] = {name_of[number]: value for number, value in state["state"].items()}
    second.load_state_dict(state)
    train(old, first, 1)
    train(ours, second, 1)
    want = in_todays_names({n: p.detach() for n, p in sorted(old.named_parameters(), key=lambda item: len(item[0]))})
    for name, p in ours.named_parameters():
        assert_same_bits(p.detach(), want[name], name)


def test_states_of_two_stacks_are_not_joined(device):
    old, ours = as_before(many(device, 0)), many(device, 1)
    first, second = (FusedAdam(m.named_parameters(), lr=0.1) for m in (old, ours))
    train(old, first, 0)
    state = states_of(first)
    names = state["param_groups"][0]["param_names"]
    one, two = names.index(f"{NAMES[0]}3"), names.index(f"{NAMES[1]}3")
    names[one], names[two] = names[two], names[one]
    with refused(
        ValueError, "FusedAdam.load_state_dict", f"{NAMES[1]}3", f"wanted {NAMES[0]}0 to {NAMES[0]}{MANY - 1}"
    ):
        second.load_state_dict(state)
    assert not second.state


def test_another_number_of_groups_is_torchs_error(device):
    old, ours = as_before(build(device)), build(device)
    extra = torch.nn.Parameter(torch.zeros(3, device=device))
    first, second = FusedAdam([{"params": old.parameters()}, {"params": [extra]}]), FusedAdam(ours.parameters())
    with refused(ValueError, "number of parameter groups"):
        second.load_state_dict(first.state_dict())


def test_states_of_torchs_sgd_go_on_by_way_of_fused_sgd(device):
    old, ours = as_before(many(device, 0)), many(device, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (old, ours))
    train(old, first, 0)
    ours.load_state_dict(old.state_dict())
    with refused(ValueError, "parameter group"):
        second.load_state_dict(states_of(first))
    way = FusedSGD(ours.parameters(), lr=0.1, momentum=0.9)
    way.load_state_dict(states_of(first))
    second.load_state_dict(way.state_dict())
    train(old, first, 1)
    train(ours, second, 1)
    want = in_todays_names({n: p.detach() for n, p in old.named_parameters()})
    for name, p in ours.named_parameters():
        assert_same_bits(p.detach(), want[name], name)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_both_forms_are_refused(nested, strict, device):
    """As set_model_state_dict(full_state_dict=True) gives them, with the module's own weight."""
    ours = build(device)
    state = as_before(build(device)).state_dict() | ours.state_dict()
    before, module = ours.experts.fc1.weight.detach().clone(), torch.nn.Sequential(ours) if nested else ours
    with refused(
        RuntimeError, f"{NAMES[0]} is one parameter", f"beside {'0.' * nested}{NAMES[0]}0", "set_model_state_dict"
    ):
        module.load_state_dict({f"{'0.' * nested}{name}": t for name, t in state.items()}, strict=strict)
    assert_same_bits(ours.experts.fc1.weight.detach(), before)


class Own(torch.nn.Parameter):
    """As a sharded parameter is of a class of its own."""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_a_parameter_of_another_class_is_refused(assign, nested, device):
    ours = build(device)
    state = as_before(build(device)).state_dict()
    ours.experts.fc1._parameters["weight"] = weight = Own(ours.experts.fc1.weight.detach().clone())
    before, module = weight.detach().clone(), torch.nn.Sequential(ours) if nested else ours
    with refused(
        RuntimeError, f"{NAMES[0]} is one parameter for all groups, here a Own", "not sharded", "state_dict()"
    ):
        module.load_state_dict({f"{'0.' * nested}{name}": t for name, t in state.items()}, False, assign)
    assert_same_bits(ours.experts.fc1.weight.detach(), before)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_a_parametrization_computes_are_unexpected(nested, device):
    ours = build(device)
    torch.nn.utils.parametrize.register_parametrization(ours.experts.fc1, "weight", torch.nn.Identity())
    prefix = "0." * nested
    state = {f"{prefix}{name}": t for name, t in as_before(build(device)).state_dict().items()}
    module = torch.nn.Sequential(ours) if nested else ours
    result = module.load_state_dict(state, strict=False)
    assert result.missing_keys == [f"{prefix}experts.fc1.parametrizations.weight.original"]
    assert result.unexpected_keys == [f"{prefix}{NAMES[0]}{i}" for i in range(EXPERTS)]
    with refused(RuntimeError, "Missing key(s)", "Unexpected key(s)", f"{prefix}{NAMES[0]}0"):
        module.load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_go_to_the_experts_of_their_numbers(assign, device):
    old, ours = as_before(many(device, 0)), many(device, 1)
    state = old.state_dict()
    ours.load_state_dict(dict(sorted(state.items())), assign=assign)
    for name in NAMES:
        assert_same_bits(ours.get_parameter(name).detach(), torch.stack([state[f"{name}{i}"] for i in range(MANY)]))


@pytest.mark.filterwarnings("ignore:.*meta")
def test_a_stack_on_meta_warns(device):
    """As torch does of its own parameters."""
    with pytest.warns(UserWarning, match=r"fc1\.weight is on meta, and stays without the values"):
        build("meta").load_state_dict(as_before(build(device)).state_dict())


@pytest.mark.parametrize("nested", [False, True])
def test_values_that_cannot_be_copied_are_named(nested, device):
    state = as_before(build(device)).state_dict()
    state[f"{NAMES[1]}2"] = state[f"{NAMES[1]}2"].to("meta")
    ours, prefix = build(device), "0." * nested
    with refused(RuntimeError, f"{prefix}{NAMES[1]}2, ({HIDDEN}, {FFN}), was not copied", "meta"):
        module = torch.nn.Sequential(ours) if nested else ours
        module.load_state_dict({f"{prefix}{name}": t for name, t in state.items()})
