"""States of FusedAdam: state_dict in float32 whatever is kept, resumed bit for bit from state_dict, safetensors, DCP;
read into other dtypes, set and read one by one, copied and pickled; what is refused with nothing changed."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support import assert_same_bits, assert_within, randn, refused, wide
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine.pytorch.optimizers import FusedAdam

from .cases import assert_same, everything, give_grads, kept_error, more_steps, parameters, trained

MASTERS = {"master_weights": True}
BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FORMATS = {
    "float32": {},
    "masters": MASTERS,
    "remainders": MASTERS | {"store_param_remainders": True},
    "bfloat16": MASTERS | BF16_MOMENTS,
    "float16": MASTERS | dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"), torch.float16),
    "fp8": MASTERS | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


def twin(optimizer, name):
    """An optimizer of the same kind over copies of the weights."""
    return FusedAdam(
        [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]], **FORMATS[name]
    )


class Reciprocals(TorchDispatchMode):
    """Any device divides by a number as CUDA does: by a product with its reciprocal."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.div.Tensor and isinstance(args[1], float):
            return args[0] * (1 / torch.tensor(args[1])).item()
        return func(*args, **(kwargs or {}))


def as_tensors(state_dict):
    return {f"{i}.{name}": t.contiguous() for i, s in state_dict["state"].items() for name, t in s.items()}


@pytest.mark.parametrize("route", ("state_dict", "torch.save", "safetensors"))
@pytest.mark.parametrize("name", FORMATS)
def test_resumed_bit_for_bit(device, name, route, tmp_path):
    first = trained(parameters(device, torch.bfloat16), 3, lr=3e-3, weight_decay=0.1, **FORMATS[name])
    saved, second = first.state_dict(), twin(first, name)
    for i, state in saved["state"].items():
        for key, t in state.items():
            remainder = name == "remainders" and key == "master_param"
            assert t.dtype is (torch.int16 if remainder else torch.float32), (i, key)
    if route == "torch.save":
        torch.save(saved, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
    elif route == "safetensors":
        save_file(as_tensors(saved), tmp_path / "state.safetensors")
        state = {}
        for key, t in load_file(tmp_path / "state.safetensors").items():
            i, kind = key.split(".")
            state.setdefault(int(i), {})[kind] = t
        saved = {"state": state, "param_groups": copy.deepcopy(saved["param_groups"])}
    second.load_state_dict(saved)
    assert second.param_groups[0]["step"] == 3 and second.param_groups[0]["lr"] == 3e-3
    more_steps(first, 2, 3)
    more_steps(second, 2, 3)
    assert_same(everything(second), everything(first))


class Model(torch.nn.Module):
    def __init__(self, device, dtype=torch.bfloat16):
        super().__init__()
        self.weights = torch.nn.ParameterList(parameters(device, dtype, (1, 7, 300)))


@pytest.mark.parametrize("name", FORMATS)
def test_resumed_from_dcp(device, name, tmp_path):
    first_model, second_model = Model(device), Model(device)
    first = trained(first_model.parameters(), 3, lr=3e-3, **FORMATS[name])
    dcp.save({"optimizer": get_optimizer_state_dict(first_model, first)}, checkpoint_id=tmp_path)
    second_model.load_state_dict(first_model.state_dict())
    second = FusedAdam(second_model.parameters(), lr=1.0, **FORMATS[name])
    into = {"optimizer": get_optimizer_state_dict(second_model, second)}
    dcp.load(into, checkpoint_id=tmp_path)
    second_model.load_state_dict(first_model.state_dict())
    set_optimizer_state_dict(second_model, second, into["optimizer"])
    assert second.param_groups[0]["step"] == 3 and second.param_groups[0]["lr"] == 3e-3
    more_steps(first, 2, 3)
    more_steps(second, 2, 3)
    assert_same(everything(second), everything(first))


def test_bfloat16_moments_into_float32_and_back(device):
    low = trained(parameters(device), 3, **BF16_MOMENTS)
    high = FusedAdam(parameters(device))
    high.load_state_dict(low.state_dict())
    for p, q in zip(low.param_groups[0]["params"], high.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(high.state[q][name], low.state[p][name].float())
    again = FusedAdam(parameters(device), **BF16_MOMENTS)
    again.load_state_dict(high.state_dict())
    for p, q in zip(low.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(again.state[q][name], low.state[p][name])


@pytest.mark.parametrize("name", ("float16", "fp8"))
def test_values_that_were_read_come_back(device, name):
    """The scale that made them is found again in the largest of them: of every mantissa that a scale can have, and so
    of the largest of many draws."""
    amax, largest = torch.arange(2**23, 2**24, dtype=torch.int32).float(), {"float16": 32752.0, "fp8": 448.0}[name]
    scales = amax / largest
    assert torch.equal(scales * largest / largest, scales)
    with Reciprocals():
        for seed in range(20):
            params = parameters(device, torch.bfloat16, (65,), seed)
            first = trained(params, 1, first=seed, **FORMATS[name])
            second = twin(first, name)
            second.load_state_dict(first.state_dict())
            for key in ("exp_avg", "exp_avg_sq", "master_param"):
                assert_same_bits(
                    second.get_unscaled_state(second.param_groups[0]["params"][0], key),
                    first.get_unscaled_state(params[0], key),
                )


@pytest.mark.parametrize("name", ("float16", "fp8"))
def test_a_nan_takes_no_other_value_along(device, name):
    """A step computes a scale from the values that are not NaN, and so does reading a state."""
    (p,) = params = parameters(device, sizes=(300,))
    first = FusedAdam(params, **FORMATS[name])
    give_grads(params)
    p.grad.mul_(1e-4)[7] = torch.nan
    first.step()
    second = twin(first, name)
    second.load_state_dict(first.state_dict())
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        want, got = (o.get_unscaled_state(o.param_groups[0]["params"][0], key) for o in (first, second))
        assert want.isnan().nonzero().tolist() == got.isnan().nonzero().tolist() == [[7]]
        assert want.nan_to_num().abs().max() > 0
        assert_same_bits(got.nan_to_num(), want.nan_to_num(), key)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.uint8))
def test_states_one_by_one(device, dtype):
    (p,) = parameters(device, sizes=(500,))
    optimizer = FusedAdam([p], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    optimizer.initialize_state(p)
    assert not optimizer.get_unscaled_state(p, "exp_avg").any()
    values = randn(500, device=device) * 1e-5
    optimizer.set_scaled_state(p, "exp_avg", values)
    got = optimizer.get_unscaled_state(p, "exp_avg")
    assert got.dtype is torch.float32 and optimizer.state[p]["exp_avg"].dtype is dtype
    assert_within(got, wide(values), kept_error(wide(values), dtype))
    if dtype is torch.float32:
        assert got is optimizer.state[p]["exp_avg"]
    optimizer.set_scaled_state(p, "exp_avg", torch.zeros_like(values))
    assert not optimizer.get_unscaled_state(p, "exp_avg").any()


def test_bytes_are_values_by_a_scale_of_1(device):
    (p,) = parameters(device, sizes=(500,))
    optimizer = FusedAdam([p], exp_avg_dtype=torch.uint8)
    optimizer.set_scaled_state(p, "exp_avg", randn(500, device=device) * 1e-5)
    given = torch.arange(500, device=device).remainder(126).byte()
    optimizer.set_scaled_state(p, "exp_avg", given)
    assert_same_bits(optimizer.get_unscaled_state(p, "exp_avg"), given.view(torch.float8_e4m3fn).float())


def test_a_state_of_another_kind_is_stepped(device):
    """The step discards its cached checks of the earlier states."""
    (p,) = parameters(device, dtype=torch.bfloat16, sizes=(500,))
    optimizer = FusedAdam([p], master_weights=True, store_param_remainders=True)
    more_steps(optimizer, 1)
    optimizer.initialize_state(p, store_param_remainders=False)
    more_steps(optimizer, 1, first=1)
    master = optimizer.state[p]["master_param"]
    assert master.dtype is torch.float32
    assert_same_bits(master.bfloat16(), p.detach())


def test_states_of_a_framework(device):
    """One that makes states itself, before the first step: the step goes on from them."""
    a, b = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16)
    ours, theirs = FusedAdam(a, **MASTERS), FusedAdam(b, **MASTERS)
    for p, q in zip(a, b, strict=True):
        ours.initialize_state(p, store_param_remainders=False)
        values = randn(p.numel(), device=device).abs()
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            ours.set_scaled_state(p, name, values)
            theirs.set_scaled_state(q, name, values)
    more_steps(ours, 1)
    more_steps(theirs, 1)
    assert_same(everything(ours), everything(theirs))


@pytest.mark.parametrize("how", (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))), ids=("deepcopy", "pickle"))
def test_copies_go_on(device, how):
    first = trained(parameters(device, torch.bfloat16), 2, **FORMATS["float16"], weight_decay=0.1, adam_w_mode=False)
    second = how(first)
    more_steps(first, 2, 2)
    more_steps(second, 2, 2)
    assert_same(everything(second), everything(first))


def test_hooks_around_checkpoints(device):
    first = trained(parameters(device, torch.bfloat16), 1, **BF16_MOMENTS)
    seen = []
    first.register_state_dict_post_hook(lambda _, d: seen.append(d["state"][4]["exp_avg"].dtype))
    saved = first.state_dict()
    first.register_load_state_dict_pre_hook(lambda _, d: seen.append(type(d["state"][4]).__name__))
    first.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["step"]))
    first.load_state_dict(saved)
    assert seen == [torch.float32, "dict", 1] and not first._optimizer_state_dict_post_hooks.keys() > {0, 1}


def test_loading_keeps_the_memory(device):
    optimizer = trained(parameters(device), 1)
    p = optimizer.param_groups[0]["params"][3]
    before, saved = optimizer.state[p]["exp_avg"], copy.deepcopy(optimizer.state_dict())
    more_steps(optimizer, 1, 1)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["exp_avg"] is before
    assert_same_bits(before, saved["state"][3]["exp_avg"])


def test_loading_brings_states_into_the_layout_of_the_weights(device):
    """A model that goes into another memory format takes its states along by a state_dict."""
    images = torch.nn.Parameter(randn(4, 3, 5, 5, device=device))
    ours, plain = trained([images], 1), trained([torch.nn.Parameter(images.detach().clone())], 0)
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    images.data = images.detach().to(memory_format=torch.channels_last)
    ours.load_state_dict(ours.state_dict())
    for optimizer in (ours, plain):
        more_steps(optimizer, 2, 1)
    assert ours.state[images]["exp_avg"].stride() == images.stride()
    assert_same(everything(ours), everything(plain))


def spoiled(saved, change):
    saved = copy.deepcopy(saved)
    change(saved["state"][1])
    return saved


@pytest.mark.parametrize(
    "words, change",
    [
        (("exp_avg", "shape [3]", "[7]"), lambda s: s.update(exp_avg=torch.zeros(3))),
        (("exp_avg_sq", "int64", "float32"), lambda s: s.update(exp_avg_sq=torch.zeros(7).long())),
        (("exp_avg_sq", "uint8"), lambda s: s.update(exp_avg_sq=torch.zeros(7, dtype=torch.uint8))),
        (("master_param", "int16", "float32"), lambda s: s.update(master_param=torch.zeros(7, dtype=torch.int16))),
        (("exp_avg", "3.0", "tensor"), lambda s: s.update(exp_avg=3.0)),
        (("has ['exp_avg', 'exp_avg_sq']", "master_param"), lambda s: s.pop("master_param")),
        (("'step'", "wanted ['exp_avg'"), lambda s: s.update(step=torch.zeros(1))),
    ],
    ids=["shape", "integers", "bytes", "master", "number", "missing", "too many"],
)
def test_a_bad_state_changes_nothing(device, words, change):
    first = trained(parameters(device, torch.bfloat16, (5, 7)), 2, **MASTERS)
    second = trained(parameters(device, torch.bfloat16, (5, 7)), 1, lr=0.5, **MASTERS)
    before, groups = everything(second), copy.deepcopy(second.state_dict()["param_groups"])
    with refused(ValueError, "FusedAdam.load_state_dict", *words):
        second.load_state_dict(spoiled(first.state_dict(), change))
    assert_same(everything(second), before)
    assert second.state_dict()["param_groups"] == groups


def test_states_of_other_options_are_refused(device):
    remainders = trained(parameters(device, torch.bfloat16), 1, **FORMATS["remainders"])
    masters = trained(parameters(device, torch.bfloat16), 1, **MASTERS)
    for of, into in ((remainders, masters), (masters, remainders)):
        with refused(ValueError, "master_param", "int16"):
            into.load_state_dict(of.state_dict())
    with refused(ValueError, "master_param", "options"):
        FusedAdam(parameters(device, torch.bfloat16)).load_state_dict(masters.state_dict())
    groups = masters.state_dict()
    groups["param_groups"][0]["betas"] = (0.9, 1.5)
    with refused(ValueError, "betas", "1.5"):
        masters.load_state_dict(groups)


def test_bad_names_and_values(device):
    (p,) = parameters(device, sizes=(4,))
    optimizer = FusedAdam([p])
    with refused(ValueError, "get_unscaled_state", "'exp_avg'"):
        optimizer.get_unscaled_state(p, "exp_avg")
    with refused(ValueError, "set_scaled_state", "master_param", "exp_avg"):
        optimizer.set_scaled_state(p, "master_param", p)
    with refused(ValueError, "set_scaled_state", "[5]", "[4]"):
        optimizer.set_scaled_state(p, "exp_avg", torch.zeros(5, device=device))
    assert not optimizer.state.get(p)
    optimizer.set_scaled_state(p, "exp_avg", torch.zeros(4, device=device))
    before = p.detach().clone()
    with refused(ValueError, "exp_avg_sq", "whole state"):
        more_steps(optimizer, 1)
    assert_same_bits(p.detach(), before)
