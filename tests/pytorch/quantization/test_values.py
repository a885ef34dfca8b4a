# Values that come into weights held in FP8 alone under delayed scaling. Before a history exists they bring a scale that
# fits them, whichever way they come; test_histories.py checks the time afterwards.
import copy
import io
import pickle

import pytest
import torch
from quantized_cases import assert_same_parts
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .primary_cases import by_scale, fitting, forward_backward, forward_scale, linear, newest_amax, rule

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def assert_fits(module, values, margin=0):
    """Bytes of the values by a scale made of them, which the history contains."""
    assert_same_parts(module.weight, by_scale(values, fitting(values, margin)))
    assert forward_scale(module) == fitting(values, margin)
    assert newest_amax(module) == values.abs().amax()


# ---- putting in ----


PUT_IN = {
    "load_state_dict": lambda m, v: m.load_state_dict({"weight": v, "bias": m.bias.detach().clone()}),
    "load_state_dict, not strict": lambda m, v: m.load_state_dict({"weight": v}, strict=False),
    "load as a part": lambda m, v: torch.nn.Sequential(m).load_state_dict({"0.weight": v, "0.bias": m.bias.data}),
    "copy_": lambda m, v: m.weight.copy_(v),
    "copy_ of a row": lambda m, v: m.weight.copy_(v),
    "copy_ into .data": lambda m, v: m.weight.data.copy_(v),
    "copy_ into a view": lambda m, v: m.weight.view(4, 8, 32).copy_(v.view(4, 8, 32)),
    ".data =": lambda m, v: setattr(m.weight, "data", v),
    "set_": lambda m, v: m.weight.set_(v),
    "quantize_": lambda m, v: m.weight.quantize_(v),
    "quantize_ with a flag": lambda m, v: m.weight.quantize_(v, noop_flag=torch.zeros(1, device=v.device)),
    "the quantizer": lambda m, v: m.weight._quantizer.update_quantized(v, m.weight),
    "foreach copy": lambda m, v: torch._foreach_copy_([m.weight], [v]),
    "zero_ and add_": lambda m, v: m.weight.zero_().add_(v),
    "out": lambda m, v: torch.mul(v, 1.0, out=m.weight),
    "reset_parameters": lambda m, v: reset(m, v),
}


def reset(module, values):
    module._initializers["weight"] = lambda w: w.copy_(values)
    module.reset_parameters()


@pytest.mark.parametrize("scale", [1e-3, 50.0])
@pytest.mark.parametrize("how", PUT_IN)
def test_values_bring_their_scale(device, how, scale):
    """Far smaller than the random ones, and far larger."""
    module, values = linear(device), randn(32, 32, device=device, scale=scale)
    with torch.no_grad():
        PUT_IN[how](module, values)
    assert_fits(module, values)
    forward_backward(module)
    with torch.no_grad():  # the first step uses the scale of the values before
        module.weight.copy_(values * 0.9)
    assert_same_parts(module.weight, by_scale(values * 0.9, fitting(values)))


def test_the_margin_of_the_recipe_counts(device):
    for margin in (1, 3):
        module = linear(device, recipe=rule(margin=margin))
        assert forward_scale(module) == fitting(newest_amax(module), margin)
        values = randn(32, 32, device=device)
        module.load_state_dict({"weight": values, "bias": module.bias})
        assert_fits(module, values, margin)


INITS = {
    "normal_": lambda w: torch.nn.init.normal_(w, std=4.0),
    "uniform_": lambda w: torch.nn.init.uniform_(w, -30.0, 30.0),
    "trunc_normal_": lambda w: torch.nn.init.trunc_normal_(w, std=5.0, a=-9.0, b=9.0),
    "kaiming_uniform_": lambda w: torch.nn.init.kaiming_uniform_(w, a=5**0.5),
    "xavier_normal_": lambda w: torch.nn.init.xavier_normal_(w, gain=8.0),
    "orthogonal_": lambda w: torch.nn.init.orthogonal_(w, gain=3.0),
    "constant_": lambda w: torch.nn.init.constant_(w, 7.0),
    "eye_": lambda w: torch.nn.init.eye_(w),
}


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("init", INITS)
def test_init_functions_are_not_clipped(device, init, stepped):
    """torch computes them in several operations, each of which is rounded: within a few roundings of the plain ones.
    Since 2.15 trunc_normal_ draws again what lies outside of the bounds, which a rounding may decide for a few."""
    module = linear(device)
    if stepped:
        forward_backward(module)
    plain = torch.empty(32, 32, device=device)
    results = []
    for weight in (plain, module.weight):
        torch.manual_seed(7)
        INITS[init](weight)
        results.append(weight.detach().float() if weight is plain else weight.dequantize())
    want, got = results
    close = (got - want).abs() <= 0.2 * want.abs().max()
    assert close.float().mean() >= (0.9 if init == "trunc_normal_" else 1.0)
    assert got.abs().max() >= 0.9 * want.abs().max()


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_init_functions_of_rows_are_not_clipped(device, stepped):
    """Query, key and value of one weight, each by its own spread."""
    module = linear(device, 48)
    if stepped:
        forward_backward(module, size=48)
    plain = torch.empty(48, 48, device=device)
    for weight in (plain, module.weight):
        torch.manual_seed(7)
        for rows, std in zip(weight.chunk(3), (1.0, 40.0, 4.0)):
            torch.nn.init.normal_(rows, std=std)
    got = module.weight.dequantize()
    assert ((got - plain).abs() <= 2.0**-3 * 1.1 * plain.abs() + 2.0**-9 * module.weight._scale_inv).all()
    assert newest_amax(module) >= got.abs().max()
    forward_backward(module, size=48)
    assert forward_scale(module) <= fitting(got)


@pytest.mark.parametrize("how", ["eval", "load", "a fill"])
def test_steps_before_do_not_clip_what_is_put_in(device, how):
    module, values = linear(device), randn(32, 32, device=device, scale=100.0)
    for _ in range(2):
        forward_backward(module)
        with torch.no_grad():
            module.weight.copy_(randn(32, 32, device=device))
    with torch.no_grad():
        if how == "eval":
            module.eval()
            module.weight.copy_(values)
        elif how == "load":
            module.load_state_dict({"weight": values, "bias": module.bias})
        else:
            module.weight.zero_()
            module.weight.copy_(values)
    assert_fits(module, values)
    if how != "eval":  # of the weights before nothing is left
        assert (module.fp8_meta["scaling_fwd"].amax_history[1:, 1] == 0).all()


def test_a_model_that_only_evaluates_is_never_clipped(device):
    """Averaged weights that are copied in again and again, growing, beside a history that came with a checkpoint."""
    source = linear(device)
    for _ in range(2):
        forward_backward(source)
    module = linear(device).eval()
    module.load_state_dict(source.state_dict())
    for grown in (1.0, 3.0, 9.0, 27.0):
        values = randn(32, 32, device=device, scale=grown)
        with torch.no_grad():
            module.weight.copy_(values)
            want = by_scale(values, fitting(values))
            want.update_usage(columnwise_usage=module.weight.get_usages()["columnwise"])
            assert_same_parts(module.weight, want)
            with te.autocast(recipe=rule()):
                module(torch.ones(4, 32, device=device))


def test_a_part_of_a_checkpoint_leaves_the_other_weight(device):
    with te.quantized_model_init(recipe=rule()):
        module = te.LayerNormMLP(32, 48, device=device)
    before = module.fp8_meta["scaling_fwd"].amax_history.clone()
    kept = {name: part.clone() for name, part in module.fc1_weight._tensors().items()}
    values = randn(32, 48, device=device, scale=20.0)
    torch.nn.Module.load_state_dict(module, {"fc2_weight": values}, strict=False)
    assert_same_parts(module.fc1_weight, kept)
    assert_same_parts(module.fc2_weight, by_scale(values, fitting(values)))
    after = module.fp8_meta["scaling_fwd"].amax_history
    assert_same_bits(after[:, :4], before[:, :4])
    assert after[0, 4] == values.abs().amax()


# ---- checkpoints ----


def trained(device, scale=30.0):
    module = linear(device)
    for i in range(3):
        forward_backward(module)
        with torch.no_grad():
            module.weight.copy_(randn(32, 32, device=device, scale=scale * (1 + i)))
    return module


@pytest.mark.parametrize("through", ["memory", "a file"])
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("extra", [False, True], ids=["without scales", "with scales"])
@pytest.mark.parametrize("into", ["new", "stepped", "copied module", "unpickled module"])
def test_a_quantized_checkpoint(device, into, extra, assign, through):
    """Bytes and scale as they are; the first step after them is not clipped, and this module's history records it."""
    source, module = trained(device), linear(device)
    if into == "stepped":
        forward_backward(module)
    elif into == "copied module":
        module = copy.deepcopy(module)
    elif into == "unpickled module":
        module = pickle.loads(pickle.dumps(module))
    state = source.state_dict()
    if not extra:
        del state["_extra_state"]
    if through == "a file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True, map_location=device)
    theirs = source.fp8_meta["scaling_fwd"].amax_history.clone()
    module.load_state_dict(state, assign=assign)
    assert_same_parts(module.weight, source.weight)
    values = source.weight.dequantize()
    forward_backward(module)
    with torch.no_grad():
        module.weight.copy_(values * 0.75)
    largest = (values * 0.75).abs().max()
    assert (module.weight.dequantize() - values * 0.75).abs().max() <= largest / 16
    assert newest_amax(module) == largest
    assert_same_bits(source.fp8_meta["scaling_fwd"].amax_history, theirs)
    if extra:  # the history goes on where it was
        assert module.fp8_meta["scaling_fwd"].amax_history[1:, 1].max() == theirs[:, 1].max()


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("extra", [False, True], ids=["without scales", "with scales"])
def test_a_checkpoint_of_plain_values(device, extra, assign):
    source, module = trained(device), linear(device)
    values = randn(32, 32, device=device, scale=64.0)
    state = {"weight": values, "bias": torch.zeros(32, device=device)}
    if extra:
        state["_extra_state"] = source.get_extra_state()
    module.load_state_dict(state, assign=assign)
    if assign:  # as torch has it: the checkpoint's tensor is the parameter
        assert type(module.weight) is torch.nn.Parameter and module.weight.data_ptr() == values.data_ptr()
        forward_backward(module)
        return
    assert_same_parts(module.weight, by_scale(values, fitting(values)))
    if extra:
        assert_same_bits(module.fp8_meta["scaling_fwd"].scale, source.fp8_meta["scaling_fwd"].scale)


def test_a_resumed_run_takes_the_same_steps(device):
    """Quantized weights with their scales: bit for bit."""
    source, module = trained(device), linear(device)
    module.load_state_dict(source.state_dict())
    updates = [randn(32, 32, device=device, scale=40.0) for _ in range(3)]
    for update in updates:
        for one in (source, module):
            forward_backward(one)
            with torch.no_grad():
                one.weight.copy_(update)
        assert_same_parts(module.weight, source.weight)
        for name in ("scale", "amax_history"):
            states = (getattr(one.fp8_meta["scaling_fwd"], name) for one in (module, source))
            assert_same_bits(*states)
