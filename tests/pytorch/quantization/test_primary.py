# Weights held in FP8 alone, and the recipe that their module runs under: of the same kind, or an error that names both
# and leaves everything as it was.
import copy
import io
import itertools
import pickle

import pytest
import torch
from fp8_steps import RECIPES
from quantized_cases import assert_same_parts, parts_of
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")
E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def current(role, dtype=E4M3):
    return te.Float8CurrentScalingQuantizer(dtype, None)


def blocks(role):
    dimensions = 2 if role is None or role.tensor_type == "weight" else 1
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions)


def of_weights(dtype):
    """Of a product two operands of E5M2 are refused."""
    return lambda role: current(role, dtype if role.tensor_type == "weight" else E4M3)


def hybrid(role):
    return te.HybridQuantizer(rowwise_quantizer=current(role), columnwise_quantizer=current(role))


class OfTheirOwn(te.Float8CurrentScalingQuantizer):
    """A caller's kind, of a built-in format."""


# name -> (recipe, what its weights are): modules run under recipes whose weights are the same.
KINDS = {
    "delayed": (lambda: DelayedScaling(amax_history_len=4), "delayed"),
    "delayed, other options": (lambda: DelayedScaling(amax_history_len=7, margin=1), "delayed"),
    "current": (Float8CurrentScaling, "current"),
    "block": (Float8BlockScaling, "block"),
    "block of rows": (lambda: Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=1), "rows"),
    "custom current": (lambda: CustomRecipe(qfactory=current), "current"),
    "custom block": (lambda: CustomRecipe(qfactory=blocks), "block"),
    "custom delayed": (lambda: CustomRecipe(qfactory=lambda role: te.DelayedScalingRequest()), "delayed"),
    "custom E5M2": (lambda: CustomRecipe(qfactory=of_weights(E5M2)), "E5M2"),
    "custom hybrid": (lambda: CustomRecipe(qfactory=hybrid), "hybrid"),
    "custom kind": (lambda: CustomRecipe(qfactory=lambda role: OfTheirOwn(E4M3, None)), "own"),
    "none": (lambda: CustomRecipe(qfactory=lambda role: None), "plain"),
}

MODULES = {
    "Linear": lambda device: te.Linear(32, 32, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(32, 32, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 64, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        32, 2, fuse_qkv_params=True, attention_dropout=0.0, device=device
    ),
    "TransformerLayer": lambda device: te.TransformerLayer(
        32, 64, 2, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
}


def built(recipe, device, name="Linear"):
    with te.quantized_model_init(recipe=recipe):
        return MODULES[name](device)


def inputs(device, name="Linear"):
    return randn(16, 2, 32, device=device)


def everything(module):
    """The state that an error must not change."""
    found = {name: {k: v.clone() for k, v in parts_of(p).items()} for name, p in weights(module)}
    quantizers = [p._quantizer for _, p in weights(module)]
    states = {}
    for name, part in module.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(part, "fp8_meta", {}).get(key)
            if state is not None:
                states[name, key] = state, state.scale, state.amax_history, state.scale.clone(), state.rule
    return found, quantizers, states


def weights(module):
    return [(n, p) for n, p in module.named_parameters() if isinstance(p, te.QuantizedTensor)]


def assert_unchanged(module, before):
    found, quantizers, states = everything(module)
    for name, parts in found.items():
        assert_same_parts(parts, before[0][name])
    assert all(a is b for a, b in zip(quantizers, before[1], strict=True))
    assert states.keys() == before[2].keys()
    for key, (state, scale, history, values, rule) in states.items():
        old = before[2][key]
        assert (state, rule) == (old[0], old[4]) and scale is old[1] and history is old[2]
        assert_same_bits(values, old[3])


@pytest.mark.parametrize("runs", KINDS)
@pytest.mark.parametrize("made", KINDS)
def test_weights_of_another_kind_are_an_error_that_names_both(device, made, runs):
    (make, kind), (other, wanted) = KINDS[made], KINDS[runs]
    module, x = built(make(), device), inputs(device)
    if kind == "plain":  # nothing was quantized, and any recipe may run
        assert not weights(module)
        return
    before, recipe = everything(module), other()
    ok = kind == wanted
    for grad, training in itertools.product((True, False), (True, False)):
        module.train(training)
        with torch.set_grad_enabled(grad), te.autocast(recipe=recipe):
            if ok:
                assert module(x).isfinite().all()
                continue
            with pytest.raises(RuntimeError, match=f"Linear: .*{type(make()).__name__}.*{type(recipe).__name__}"):
                module(x)
        assert_unchanged(module, before)
    module.train()
    with te.autocast(enabled=False, recipe=recipe):
        module(x)
    with te.autocast(recipe=make()):  # as if nothing had happened
        module(x).sum().backward()


@pytest.mark.parametrize("made, runs", [(a, b) for a in RECIPES for b in RECIPES if a != b])
@pytest.mark.parametrize("name", MODULES)
def test_every_module_names_both_recipes(device, name, made, runs):
    """Also where it has run under its own, and while it calibrates."""
    own, other = RECIPES[made](), RECIPES[runs]()
    module, x = built(own, device, name), inputs(device)
    for _ in range(2):
        before = everything(module)
        for options in ({}, {"enabled": False, "calibrating": True}):
            with te.autocast(recipe=other, **options):
                with pytest.raises(RuntimeError, match=f"{type(own).__name__}.*{type(other).__name__}"):
                    module(x)
        assert_unchanged(module, before)
        with te.autocast(recipe=own):
            module(x).sum().backward()


@pytest.mark.parametrize("made, runs", [("delayed", "current"), ("current", "delayed"), ("block", "current")])
def test_a_capture_under_another_recipe_is_the_same_error(device, made, runs):
    module, x = built(RECIPES[made](), device), inputs(device)
    before = everything(module)
    own, other = RECIPES[made](), RECIPES[runs]()
    with pytest.raises(RuntimeError, match=f"{type(own).__name__}.*{type(other).__name__}"):
        te.make_graphed_callables(module, (x,), enabled=True, recipe=other)
    assert_unchanged(module, before)


def test_the_default_recipe_has_a_name(device):
    with te.quantized_model_init():
        module = te.Linear(32, 32, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        with pytest.raises(RuntimeError, match=r"under DelayedScaling .*Float8CurrentScaling"):
            module(inputs(device))
    with te.autocast():
        module(inputs(device))


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize("made, runs", [(a, b) for a in RECIPES for b in RECIPES if a != b])
def test_copies_keep_their_recipe(device, made, runs, way):
    """Files have no quantizer of delayed scaling: it comes from the module."""
    module = built(RECIPES[made](), device)
    if way == "deepcopy":
        module = copy.deepcopy(module)
    elif way == "pickle":
        module = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        module = torch.load(file, weights_only=False, map_location=device)
    own, other = RECIPES[made](), RECIPES[runs]()
    with te.autocast(recipe=other), pytest.raises(RuntimeError, match=f"{type(own).__name__}.*{type(other).__name__}"):
        module(inputs(device))
    with te.autocast(recipe=own):
        module(inputs(device)).sum().backward()


def test_a_weight_that_takes_the_place_of_another_is_looked_at(device):
    """After the recipe was entered: a parameter of another kind, and one of the same."""
    module, x = built(Float8CurrentScaling(), device), inputs(device)
    with te.autocast(recipe=Float8CurrentScaling()):
        module(x)
        module.weight = torch.nn.Parameter(blocks(None)(randn(32, 32, device=device)))
        with pytest.raises(RuntimeError, match=r"Float8BlockScaling.*Float8CurrentScaling"):
            module(x)
        module.weight = torch.nn.Parameter(current(None)(randn(32, 32, device=device)))
        module(x).sum().backward()
    delayed = built(DelayedScaling(amax_history_len=4), device)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        delayed(x)
    given = te.Float8Quantizer(torch.ones(1, device=device), torch.zeros(1, device=device), E4M3)
    delayed.weight = torch.nn.Parameter(given(randn(32, 32, device=device)))
    largest = delayed.weight.dequantize().abs().max()
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        delayed(x).sum().backward()
    assert delayed.weight._quantizer is not given
    with torch.no_grad():  # by the module's scales from now on, which know of it
        delayed.weight.mul_(1.0)
    assert delayed.fp8_meta["scaling_fwd"].amax_history[0, 1] == largest
    assert (delayed.weight.dequantize().abs().max() - largest).abs() <= 1e-6 * largest


def test_other_options_of_the_same_kind_are_taken_up(device):
    """Powers of two, in the running recipe: by the next values."""
    module = built(Float8CurrentScaling(), device)
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_weight = type(recipe.fp8_quant_fwd_weight)(power_2_scale=True)
    with te.autocast(recipe=recipe):
        module(inputs(device))
    with torch.no_grad():
        module.weight.copy_(randn(32, 32, device=device))
    assert torch.frexp(module.weight._scale_inv)[0] == 0.5


@pytest.mark.parametrize("made", RECIPES)
def test_masters_are_tracked_under_the_right_recipe(device, made):
    """Five steps of a high-precision master, quantized into the weight: within FP8's rounding of it."""
    recipe = RECIPES[made]()
    module = built(recipe, device)
    master = module.weight.dequantize()
    for _ in range(5):
        with te.autocast(recipe=recipe):
            module(inputs(device)).sum().backward()
        master = master - 0.05 * randn(32, 32, device=device)
        module.weight.quantize_(master)
    difference = (module.weight.dequantize() - master).abs().max()
    assert difference <= master.abs().max() * (2.0**-4 if made != "delayed" else 0.5)


# ---- kept weights ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_weight_kept_without_gradients_serves_training(device, name, recipe):
    """Kept for an evaluation it has no columnwise data; what trains with it next gets the same gradients as ever."""
    chosen = RECIPES[recipe]()
    module, x = MODULES[name](device).eval(), inputs(device).requires_grad_()
    with torch.no_grad(), te.autocast(recipe=chosen):
        kept = module(x, is_first_microbatch=True)
    grads = []
    for first in (False, None):
        with te.autocast(recipe=chosen):
            y = module(x, is_first_microbatch=first)
        assert_same_bits(y, kept)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))
    for got, want in zip(*grads, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("first", [True, False, None])
def test_a_weight_kept_in_eval_notes_nothing(device, name, first):
    chosen = DelayedScaling(amax_history_len=4)
    module, x = MODULES[name](device), inputs(device)
    with te.autocast(recipe=chosen):
        module(x).sum().backward()
    module.eval()
    state = module.fp8_meta["scaling_fwd"]
    before = state.amax_history.clone(), state.scale.clone()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(3.0)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), te.autocast(recipe=chosen):
            module(x, is_first_microbatch=first)
        assert_same_bits(state.amax_history, before[0])
        assert_same_bits(state.scale, before[1])
    module.train()
    with te.autocast(recipe=chosen):
        module(x, is_first_microbatch=True)
        largest = max(p.abs().max() for n, p in module.named_parameters() if n in ("weight", "fc1_weight"))
        assert state.amax_history[0, 1] == largest


# ---- inference ----


def has_columns(module):
    return [
        weight.get_usages()["columnwise"] for weight in module.parameters() if isinstance(weight, te.QuantizedTensor)
    ]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*MODULES, "GroupedLinear"])
def test_inference_keeps_no_columnwise_data(device, name, recipe):
    """Made for inference it never has them; inside of autocast or not they go; training has its gradients all the
    same."""
    chosen = RECIPES[recipe]()
    makers = MODULES | {"GroupedLinear": lambda device: te.GroupedLinear(2, 32, 32, device=device)}
    x = randn(32, 32, device=device)
    if name in ("MultiheadAttention", "TransformerLayer"):
        x = x.reshape(32, 1, 32)
    more = ([16, 16],) if name == "GroupedLinear" else ()
    modules = []
    for grad_mode in (torch.enable_grad, torch.no_grad):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=chosen), grad_mode():
            modules.append(makers[name](device))
    trained, served = modules
    assert has_columns(trained) and all(has_columns(trained)) and not any(has_columns(served))
    for autocast in (False, True):
        with torch.inference_mode(), te.autocast(enabled=autocast, recipe=chosen):
            trained(x, *more)
        assert not any(has_columns(trained))
        grads = []
        for module in modules:
            with te.autocast(recipe=chosen):
                module(x, *more).square().sum().backward()
            grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
            module.zero_grad()
        assert grads[0] and all(has_columns(trained))
        for got, want in zip(*grads, strict=True):
            assert_same_bits(got, want)
