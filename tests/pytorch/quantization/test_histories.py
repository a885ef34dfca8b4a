# Weights held in FP8 alone after their first step: the recipe makes the scale, and scale and history stay together
# where either moves.
import copy
import pickle

import pytest
import torch
from quantized_cases import assert_same_parts
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .primary_cases import LENGTH, by_scale, fitting, forward_backward, forward_scale, linear, newest_amax, rule

pytestmark = pytest.mark.usefixtures("fp8_left_off")


# ---- steps ----


@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_step_follows_the_recipe(device, algorithm, margin):
    """The scale of each step is made of the amaxes of those before it, and of no more than the history holds: against
    the recipe in plain Python. A jump clips one step, and the next one fits."""
    recipe = rule(amax_compute_algo=algorithm, margin=margin)
    module = linear(device, recipe=recipe)
    amaxes = [newest_amax(module).item()]
    for size in (1.0, 1.5, 0.3, 40.0, 40.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.1):
        forward_backward(module, recipe)
        seen = amaxes[-1:] if algorithm == "most_recent" else amaxes[-LENGTH:]
        scale = torch.tensor(448.0, device=device) / torch.tensor(max(seen), device=device) / 2.0**margin
        values = randn(32, 32, device=device, scale=size)
        with torch.no_grad():
            module.weight.copy_(values)
        assert_same_parts(module.weight, by_scale(values, scale), f"size {size}")
        amaxes.append(values.abs().amax().item())
        assert newest_amax(module) == amaxes[-1]


def test_quantized_data_within_a_run_are_covered(device):
    """copy_ of a quantized tensor takes its bytes, and the next step is not clipped to what the history had."""
    module, values = linear(device), randn(32, 32, device=device, scale=50.0)
    forward_backward(module)
    with torch.no_grad():
        module.weight.copy_(by_scale(values, fitting(values)))
    assert_same_parts(module.weight, by_scale(values, fitting(values)))
    forward_backward(module)
    with torch.no_grad():
        module.weight.copy_(values)
    assert (module.weight.dequantize() - values).abs().max() <= values.abs().max() / 16


def test_master_weights_are_followed(device):
    """quantize_ of high-precision masters in each step, as sharded optimizers do: within FP8 rounding of them."""
    module = linear(device)
    master = module.weight.dequantize()
    for i in range(8):
        forward_backward(module)
        master = master + randn(32, 32, device=device, scale=0.05 * (i + 1))
        module.weight.quantize_(master)
    forward_backward(module)
    module.weight.quantize_(master)
    assert (module.weight.dequantize() - master).abs().max() <= master.abs().max() / 16


# ---- histories that move ----


MOVES = {
    "adjust_amax_history_length": lambda m, r: m.adjust_amax_history_length(8),
    "shorter": lambda m, r: m.adjust_amax_history_length(1),
    "another recipe": lambda m, r: forward_backward(m, rule(amax_history_len=7)),
    "a checkpoint": lambda m, r: m.load_state_dict(linear("cpu", recipe=rule(amax_history_len=9)).state_dict()),
    "deepcopy": lambda m, r: copy.deepcopy(m),
    "pickle": lambda m, r: pickle.loads(pickle.dumps(m)),
    "to the meta device and back": lambda m, r: m.to("meta").to_empty(device=r),
    "to a dtype": lambda m, r: m.to(torch.bfloat16),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_weight_follows_its_history(device, how):
    """Later steps are written by the module's scales, and noted where these are made."""
    module = linear(device)
    forward_backward(module)
    held = module.quantizers["scaling_fwd"][1], module.weight._quantizer
    moved = MOVES[how](module, device)
    same = how not in ("deepcopy", "pickle")
    module = module if same else moved
    length = len(module.fp8_meta["scaling_fwd"].amax_history)
    recipe = rule(amax_history_len=length)
    for size in (1.0, 6.0, 6.0):
        forward_backward(module, recipe)
        values = torch.full((32, 32), size, device=device, dtype=module.weight.dtype)
        with torch.no_grad():
            module.weight.copy_(values)
        assert newest_amax(module) == size
    assert (module.weight.dequantize() == 6.0).all()
    if same:  # quantizers that were held see the same
        for quantizer in held:
            assert quantizer.amax.data_ptr() == newest_amax(module).data_ptr()
            assert quantizer.scale == forward_scale(module)


def test_other_quantizers_of_a_module_follow_too(device):
    module = te.Linear(32, 32, device=device)
    with te.autocast(recipe=rule()):
        module(torch.ones(4, 32, device=device))
    held = module.quantizers
    module.adjust_amax_history_length(9)
    for key, state in ((k, module.fp8_meta[k]) for k in ("scaling_fwd", "scaling_bwd")):
        for column, quantizer in enumerate(held[key]):
            quantizer(torch.full((4, 4), 2.0 + column, device=device))
            assert state.amax_history[0, column] == 2.0 + column
            assert quantizer.scale.data_ptr() == state.scale[column].data_ptr()


def test_copies_of_a_module_have_scales_of_their_own(device):
    module = linear(device)
    forward_backward(module)
    twin = copy.deepcopy(module)
    before = module.fp8_meta["scaling_fwd"].amax_history.clone()
    with torch.no_grad():
        twin.weight.copy_(torch.full((32, 32), 3.0, device=device))
    assert newest_amax(twin) == 3.0
    assert_same_bits(module.fp8_meta["scaling_fwd"].amax_history, before)


@pytest.mark.parametrize("fwd", [None, True, False])
def test_amaxes_of_a_backward_in_flight_arrive(device, fwd):
    """The history is replaced between a forward and its backward."""
    module, x = te.Linear(32, 32, device=device), randn(4, 32, device=device, requires_grad=True)
    with te.autocast(recipe=rule()):
        y = module(x)
    module.adjust_amax_history_length(8, fwd)
    y.backward(torch.full_like(y, 5.0))
    history = module.fp8_meta["scaling_bwd"].amax_history
    assert history[-1, 0] == 5.0 and module.fp8_meta["scaling_bwd"].scale[0] == 57344.0 / 5.0


def test_what_is_not_put_in_leaves_scale_and_history(device):
    module = linear(device)

    def held():
        return forward_scale(module).view(1), newest_amax(module).view(1), module.weight._data

    with torch.no_grad():
        module.weight.copy_(randn(32, 32, device=device))
    before = [t.clone() for t in held()]
    assert before[1] > 0
    flag = torch.ones(1, device=device)
    module.weight._quantizer.update_quantized(randn(32, 32, device=device) * 1e3, module.weight, noop_flag=flag)
    for t, was in zip(held(), before, strict=True):
        assert_same_bits(t, was)
