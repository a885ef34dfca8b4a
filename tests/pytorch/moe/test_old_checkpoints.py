# Checkpoints from when each expert of a MoEMLP had a parameter: state dicts load with every option or name what does
# not fit, states of optimizers go on to the bit or are refused, and nothing is loaded into another expert.
import copy
import io
import pickle

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .cases import BF16, EXPERTS, FFN, HIDDEN, TOKENS, as_before, build, in_todays_names, recipe_of

pytestmark = pytest.mark.usefixtures("fp8_left_off")
NAMES = [f"experts.fc{k}.weight" for k in (1, 2)]


def tensors(state):
    return {name: t for name, t in state.items() if "_extra_state" not in name}


def saved(state):
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Model(torch.nn.Module):
    """The mixture among other layers, in a class of a client."""

    def __init__(self, device, **options):
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16, device=device)
        self.moe = build(device, **options)
        self.last = te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device=device)

    def forward(self, x):
        return self.last(self.moe(self.first(x))[0])

    def before(self):
        twin = copy.deepcopy(self)
        twin.moe = as_before(self.moe)
        return twin


def model(device, seed=0, before=False, **options):
    torch.manual_seed(seed)
    made = Model(device, **options)
    return made.before() if before else made


def assert_same_weights(ours, old):
    want = in_todays_names({n: p.detach() for n, p in old.named_parameters()})
    got = {n: p.detach() for n, p in ours.named_parameters()}
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert_same_bits(got[name], t, name)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("start", ["real", "meta"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_state_dict_loads(nested, start, assign, device):
    old = model(device, before=True)
    ours = model("meta" if start == "meta" else device, 1)
    if start == "meta" and not assign:
        ours.to_empty(device=device)
    one, other = (ours, old) if nested else (ours.moe, old.moe)
    result = one.load_state_dict(saved(other.state_dict()), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_weights(one, other)
    for part in (ours.moe.experts.fc1, ours.moe.experts.fc2):
        assert part.weight.is_contiguous() and part.weight.stacked is True and part.weight.requires_grad
    if nested or start == "real":
        x = randn(TOKENS, HIDDEN, dtype=BF16, device=device)
        assert_same_bits(one(x)[0] if one is ours.moe else one(x), other(x)[0] if one is ours.moe else other(x))
    again = {n: t for n, t in ours.state_dict().items() if n.endswith("weight")}
    assert f"moe.{NAMES[0]}" in again and "moe.experts.fc1.weight0" not in again
    ours.load_state_dict(ours.state_dict())


def test_a_state_dict_of_today_loads_into_parts_with_a_parameter_for_each(device):
    """te.GroupedLinear, in the place of the experts' parts."""
    ours, old = build(device), as_before(build(device))
    old.load_state_dict(saved(ours.state_dict()))
    assert_same_weights(ours, old)


def test_rows_of_one_matrix_load(device):
    ours, other = build(device), build(device)
    state = ours.state_dict()
    other.load_state_dict(state | {name: state[name].flatten(0, 1) for name in NAMES})
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())


def test_other_dtypes_and_kept_fp8_weights(device):
    """Values are converted, and what was made of the former ones is made again."""
    ours, old = build(device), as_before(build(device, torch.float32))
    x = randn(TOKENS, HIDDEN, dtype=BF16, device=device)
    with te.autocast(enabled=True, recipe=recipe_of("block")):
        ours(x, True)
        ours.load_state_dict(old.state_dict())
        assert not ours.experts.fc1.runtime.quantization.weights.kept
        got = ours(x, False)[0]
    want = in_todays_names({n: p.detach() for n, p in old.named_parameters()})
    for name in NAMES:
        assert_same_bits(ours.get_parameter(name).detach(), want[name].to(BF16))
    with te.autocast(enabled=True, recipe=recipe_of("block")):
        assert_same_bits(got, ours(x)[0])


def test_a_module_that_was_pickled_computes_as_it_did(device):
    old = as_before(build(device))
    loaded = pickle.loads(pickle.dumps(old))
    x = randn(TOKENS, HIDDEN, dtype=BF16, device=device)
    assert_same_bits(loaded(x)[0], old(x)[0])
    assert len(list(loaded.experts.parameters())) == 2 * EXPERTS
    ours = build(device)
    ours.load_state_dict(loaded.state_dict())
    assert_same_bits(ours(x)[0], old(x)[0])


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_missing_is_named(assign, device):
    """Nothing is loaded into a MoEMLP then; as part of another module it loads as torch's do."""
    ours, state = build(device), saved(as_before(build(device)).state_dict())
    del state["experts.fc1.weight2"], state["experts.fc2.weight0"]
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    words = ("experts.fc1.weight2", "experts.fc2.weight0")
    with pytest.raises(RuntimeError, match="nothing was loaded") as caught:
        ours.load_state_dict(state, assign=assign)
    assert all(word in str(caught.value) for word in words)
    assert "weight1" not in str(caught.value) and "nexpected" not in str(caught.value)
    for name, p in ours.named_parameters():
        assert_same_bits(p.detach(), before[name], name)
    if assign:
        with refused(RuntimeError, "experts.fc1.weight is one parameter", "lacks experts.fc1.weight2", "assign=False"):
            ours.load_state_dict(state, strict=False, assign=True)
        return
    holder = torch.nn.Sequential(ours)
    with refused(RuntimeError, "Missing key(s)", *(f"0.{word}" for word in words)):
        holder.load_state_dict({f"0.{n}": t for n, t in state.items()})
    missing = ours.load_state_dict(state, strict=False).missing_keys
    assert missing == list(words)
    for name in NAMES:
        for i in range(EXPERTS):
            key = f"{name}{i}"
            want = before[name][i] if key in words else state[key]
            assert_same_bits(ours.get_parameter(name)[i].detach(), want, key)


def unfit(state, kind):
    """The state, and words of the error."""
    if kind == "shape":
        state["experts.fc1.weight3"] = state["experts.fc1.weight3"][:-1]
        return state, ("size mismatch for experts.fc1.weight3", f"({2 * FFN - 1}, {HIDDEN})", f"({2 * FFN}, {HIDDEN})")
    if kind == "no tensor":
        state["experts.fc1.weight3"] = [1.0]
        return state, ("experts.fc1.weight3", "list", "tensor")
    if kind == "more experts":
        state[f"experts.fc1.weight{EXPERTS}"] = state["experts.fc1.weight0"]
        return state, ("Unexpected key(s)", f"experts.fc1.weight{EXPERTS}")
    if kind == "both":
        state["experts.fc1.weight"] = torch.zeros(EXPERTS, 2 * FFN, HIDDEN)
        return state, ("Unexpected key(s)", "experts.fc1.weight0", f"experts.fc1.weight{EXPERTS - 1}")
    if kind == "one expert for all":
        state["experts.fc1.weight"] = state["experts.fc1.weight0"]
        for i in range(EXPERTS):
            del state[f"experts.fc1.weight{i}"]
        return state, ("size mismatch for experts.fc1.weight", f"({2 * FFN}, {HIDDEN})", f"({EXPERTS}, {2 * FFN}")
    state["experts.fc1.weight3"] = state["experts.fc1.weight3"].float()
    return state, ("experts.fc1.weight is one parameter", "float32", "bfloat16", "assign=False")


UNFIT = ["shape", "no tensor", "more experts", "both", "one expert for all", "mixed, assigned"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", UNFIT)
def test_what_does_not_fit_is_refused(kind, nested, device):
    ours = build(device)
    state, words = unfit(saved(as_before(build(device)).state_dict()), kind)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    module = torch.nn.Sequential(ours) if nested else ours
    if nested:
        state = {f"0.{n}": t for n, t in state.items()}
        words = [word.replace("experts.", "0.experts.") for word in words]
        words = [word.replace("(95, 32)", "95, 32").replace("(96, 32)", "96, 32").strip("()") for word in words]
    with refused(RuntimeError, *words if not nested else words[:2]):
        module.load_state_dict(state, assign=kind == "mixed, assigned")
    for name, p in ours.named_parameters() if not nested else ():
        assert_same_bits(p.detach(), before[name], name)


# ---- optimizers ----

OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1),
    "masters": lambda params: FusedAdam(params, lr=0.1, master_weights=True),
    "remainders": lambda params: FusedAdam(params, lr=0.1, master_weights=True, store_param_remainders=True),
    "bf16 moments": lambda params: FusedAdam(params, lr=0.1, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedSGD without momentum": lambda params: FusedSGD(params, lr=0.1),
}


def groups_of(kind, module):
    """One group, or decayed ones and others."""
    if kind == "one":
        return list(module.parameters())
    if kind == "named":
        return list(module.named_parameters())
    wide = [p for p in module.parameters() if p.dim() >= 2]
    return [{"params": wide}, {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def train(module, optimizer, seed, experts=EXPERTS):
    """A step with the same gradients for the same elements."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if name[-1].isdigit() and not name.endswith("weight0") and "experts" in name:
            continue
        stacked = "experts" in name
        shape = (experts, *p.shape[-2:]) if stacked else p.shape
        grad = torch.randn(shape, generator=generator).to(p)
        if stacked and p.dim() == 2:
            for i in range(experts):
                module.get_parameter(f"{name[:-1]}{i}").grad = grad[i]
        else:
            p.grad = grad
    optimizer.step()


@pytest.mark.parametrize("groups", ["one", "decay", "named"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_states_go_on(steps, kind, groups, device):
    old = model(device, before=True)
    first = OPTIMIZERS[kind](groups_of(groups, old))
    for seed in range(steps):
        train(old, first, seed)
    state = saved(first.state_dict())
    kept = copy.deepcopy(state)
    ours = model(device, 1)
    ours.load_state_dict(old.state_dict())
    second = OPTIMIZERS[kind](groups_of(groups, ours))
    second.load_state_dict(state)
    assert str(state) == str(kept)  # the caller's dict is as it was
    for seed in (5, 6):
        train(old, first, seed)
        train(ours, second, seed)
    assert_same_weights(ours, old)
    if groups == "named":
        assert second.param_groups[0]["param_names"] == [name for name, _ in ours.named_parameters()]
    third = OPTIMIZERS[kind](groups_of(groups, ours))
    third.load_state_dict(saved(second.state_dict()))  # today's
    for p in ours.parameters():
        for name, value in second.state[p].items():
            assert_same_bits(third.state[p][name], value, name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("steps", "count"), [(0, EXPERTS), (2, EXPERTS), (2, 1)])
def test_states_of_stacks_go_on_in_matrices(steps, count, kind, device):
    """Where each expert has parameters: in a module of before, and where weights are held in FP8."""
    ours = model(device, experts=(0, count))
    first = OPTIMIZERS[kind](ours.parameters())
    for seed in range(steps):
        train(ours, first, seed, count)
    old = model(device, 1, before=True, experts=(0, count))
    old.load_state_dict(ours.state_dict())
    second = OPTIMIZERS[kind](old.parameters())
    second.load_state_dict(saved(first.state_dict()))
    for seed in (5, 6):
        train(old, second, seed, count)
    kept = saved(first.state_dict())
    for seed in (5, 6):
        train(ours, first, seed, count)
    assert_same_weights(ours, old)
    if kind != "masters" or not steps or count == 1:
        return
    with te.quantized_model_init(recipe=recipe_of("block")):
        held = Model(device)
    third, first = OPTIMIZERS[kind](held.parameters()), OPTIMIZERS[kind](ours.parameters())
    for optimizer in (third, first):
        optimizer.load_state_dict(kept)
    for name, p in held.named_parameters():
        if name.startswith("moe.experts"):
            want = first.state[ours.get_parameter(name.rstrip("0123456789"))]["master_param"][int(name[-1])]
            assert_same_bits(third.state[p]["master_param"], want, name)


def test_torchs_states_go_on_in_fused_adam_and_back(device):
    """torch.optim.AdamW itself refuses them."""
    old = model(device, before=True)
    first = torch.optim.AdamW(old.parameters(), lr=0.1)
    train(old, first, 0)
    ours = model(device, 1)
    ours.load_state_dict(old.state_dict())
    second = torch.optim.AdamW(ours.parameters(), lr=0.1)
    with refused(ValueError, "parameter group"):
        second.load_state_dict(first.state_dict())
    way = FusedAdam(ours.parameters())
    way.load_state_dict(first.state_dict())
    second.load_state_dict(way.torch_state_dict())
    train(old, first, 1)
    train(ours, second, 1)
    assert_same_weights(ours, old)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "torch"])
def test_one_expert_alone(kind, device):
    """A stack of one matrix has as many states as before: they are converted, or torch's own step refuses them."""
    old = model(device, before=True, experts=(2, 3))
    make = OPTIMIZERS.get(kind, lambda params: torch.optim.AdamW(params, lr=0.1))
    first = make(old.parameters())
    train(old, first, 0, 1)
    ours = model(device, 1, experts=(2, 3))
    ours.load_state_dict(old.state_dict())
    second = make(ours.parameters())
    second.load_state_dict(saved(first.state_dict()))
    if kind == "torch":
        with pytest.raises(RuntimeError, match="shape"):
            train(ours, second, 1, 1)
        return
    train(old, first, 1, 1)
    train(ours, second, 1, 1)
    assert_same_weights(ours, old)


def damaged(state, kind):
    numbers = list(range(3, 3 + EXPERTS))  # first.weight, first.bias, the router's, then fc1's
    states = state["state"]
    if kind == "missing":
        del states[numbers[2]]
        return "none", "wanted the same for all"
    if kind == "names":
        del states[numbers[2]]["exp_avg"]
        return "['exp_avg_sq']", "wanted the same for all"
    if kind == "shape":
        states[numbers[2]]["exp_avg"] = states[numbers[2]]["exp_avg"][1:]
        return "'exp_avg'", f"[{2 * FFN - 1}, {HIDDEN}]", f"wanted [{2 * FFN}, {HIDDEN}]"
    if kind == "shapes":
        for number in numbers:
            states[number]["exp_avg"] = states[number]["exp_avg"][1:]
        return "'exp_avg'", f"[{2 * FFN - 1}, {HIDDEN}]", f"wanted [{2 * FFN}, {HIDDEN}]"
    for number in numbers:
        states[number]["step"] = torch.tensor(float(number == numbers[2]))
    return "'step'", "0.0, 1.0", "wanted one number"


@pytest.mark.parametrize("kind", ["missing", "names", "shape", "shapes", "steps"])
def test_states_that_cannot_be_joined_are_refused(kind, device):
    old, ours = model(device, before=True), model(device)
    first, second = FusedAdam(old.parameters(), lr=0.1), FusedAdam(ours.parameters(), lr=0.1)
    train(old, first, 0)
    train(ours, second, 0)
    state, before = saved(first.state_dict()), saved(second.state_dict())
    words = damaged(state, kind)
    numbers = str(list(range(3, 3 + EXPERTS)))
    with refused(ValueError, "FusedAdam.load_state_dict", numbers, f"one stack [{EXPERTS}, {2 * FFN}", *words):
        second.load_state_dict(state)
    assert str(second.state_dict()) == str(before)


def test_other_numbers_of_parameters_are_torchs_error(device):
    old, ours = model(device, before=True), model(device)
    first, second = FusedAdam(list(old.parameters())[:-1]), FusedAdam(ours.parameters())
    with refused(ValueError, "parameter group"):
        second.load_state_dict(first.state_dict())


def test_a_matrix_optimizer_refuses_the_stack(device):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    with refused(ValueError, "2D parameters", f"[{EXPERTS}, {2 * FFN}, {HIDDEN}]"):
        torch.optim.Muon(build(device).experts.parameters())
