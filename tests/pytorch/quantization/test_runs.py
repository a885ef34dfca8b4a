# Runs of modules under autocast: recomputation, checkpoints, copies, recipes that change, factories, torch.compile, bad
# input.
import copy
import pickle

import pytest
import torch
from fp8_steps import (
    RECIPES,
    all_scales,
    assert_same_tensors,
    grads_of,
    new,
    pair,
    run,
    scales_of,
    step,
    through_a_file,
)
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import _C

pytestmark = pytest.mark.usefixtures("fp8_left_off")


# ---- recomputation ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["autocast inside", "autocast around"])
def test_recomputation_is_bit_equal(device, recipe, use_reentrant, inside):
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(16, 16, device=device), te.LayerNormMLP(16, 32, device=device))
    twin = copy.deepcopy(model)
    made = RECIPES[recipe]()
    for i in range(4):
        x = randn(8, 16, device=device, scale=2.0**i, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        with te.autocast(recipe=made):
            y = model[1](model[0](x))
        if inside:

            def both(t):
                with te.autocast(recipe=made):
                    return twin[1](twin[0](t))

            z = te.checkpoint(both, again, use_reentrant=use_reentrant)
        else:
            with te.autocast(recipe=made):
                z = te.checkpoint(lambda t: twin[1](twin[0](t)), again, use_reentrant=use_reentrant)
        assert_same_bits(z, y)
        for out in (y, z):
            out.square().sum().backward()
        assert_same_bits(again.grad, x.grad)
        assert_same_tensors(grads_of(twin), grads_of(model))
        if recipe == "delayed":
            assert_same_tensors(all_scales(twin), all_scales(model))
    assert recipe != "delayed" or all_scales(model)["0 scale bwd"][0] != 1


def test_two_segments_and_two_microbatches_recompute_with_their_own_scales(device):
    """Microbatches whose scales differ, run backward in both orders."""
    for order in ((0, 1), (1, 0)):
        torch.manual_seed(0)
        model = pair(device)
        twin = copy.deepcopy(model)
        made = RECIPES["delayed"]()
        outs = {model: [], twin: []}
        for i in range(2):
            x = randn(8, 16, device=device, scale=8.0**i, requires_grad=True)
            with te.autocast(recipe=made):
                outs[model].append(model(x))
            with te.autocast(recipe=made):  # of its own: a region has one backward
                y = te.checkpoint(twin[0], x)
                outs[twin].append(te.checkpoint(twin[1], y))
        for i in order:
            for m in (model, twin):
                outs[m][i].square().sum().backward()
        assert_same_tensors(grads_of(twin), grads_of(model))
        assert_same_tensors(all_scales(twin), all_scales(model))


def test_recomputation_by_hand(device):
    """As frameworks with a checkpoint of their own do: they announce the phases, and calls are paired in order."""
    model, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    recipe = RECIPES["delayed"]()
    from transformer_engine.pytorch.distributed import activation_recompute_forward as phase

    outputs = []
    for i in range(2):
        with te.autocast(recipe=recipe), phase(True, False):
            outputs.append(model(x * 4.0**i))
    before = scales_of(model)
    for i in range(2):
        with te.autocast(recipe=recipe), phase(True, True):
            assert_same_bits(model(x * 4.0**i), outputs[i])
    assert_same_tensors(scales_of(model), before)
    with te.autocast(recipe=recipe), phase(True, True), refused(RuntimeError, "Linear", "scales of its first run"):
        model(x)


# ---- checkpoints, copies ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_is_bit_equal(device, recipe):
    batches = [randn(8, 16, device=device, scale=1.5**i) for i in range(6)]
    made = RECIPES[recipe]()
    straight, optimizer = new(device)
    run(straight, optimizer, batches, made)
    first, optimizer = new(device)
    run(first, optimizer, batches[:3], made)
    state = through_a_file(first.state_dict())
    extra = [t for key, t in state.items() if key.endswith("_extra_state")]
    assert all(t.dtype is torch.uint8 for t in extra) and all((t.numel() > 0) is (recipe == "delayed") for t in extra)
    second, optimizer = new(device)
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    second.load_state_dict(state)
    run(second, optimizer, batches[3:], made)
    assert_same_tensors(dict(second.named_parameters()), dict(straight.named_parameters()))
    if recipe == "delayed":
        assert_same_tensors(all_scales(second), all_scales(straight))
        third, optimizer = new(device)  # into a module that has scales already: the same memory
        run(third, optimizer, batches, made)
        memory = third[0].fp8_meta["scaling_fwd"].scale.data_ptr()
        third.load_state_dict(state)
        assert third[0].fp8_meta["scaling_fwd"].scale.data_ptr() == memory
        run(third, optimizer, batches[3:], made)
        assert_same_tensors(dict(third.named_parameters()), dict(straight.named_parameters()))
        without = {key: t for key, t in state.items() if not key.endswith("_extra_state")}
        fourth, _ = new(device)
        fourth.load_state_dict(without)
        assert "scaling_fwd" not in fourth[0].fp8_meta


def test_bad_state_is_named_and_the_module_unharmed(device):
    model, optimizer = new(device)
    run(model, optimizer, [randn(8, 16, device=device)], RECIPES["delayed"]())
    state = model.state_dict()
    before, weights = all_scales(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    for bad, words in (
        (state["2._extra_state"][:-5], ("LayerNormLinear", "bytes of scales")),
        (state["1._extra_state"], ("LayerNormLinear", "[4, 6], wanted [length, 3]")),
        (torch.frombuffer(bytearray(pickle.dumps({"a": 1})), dtype=torch.uint8), ("a dict without a recipe",)),
        (torch.ones(4), ("float32", "wanted a uint8 tensor")),
    ):
        with refused(ValueError, "_extra_state", *words):
            model[0].load_state_dict({**model[0].state_dict(), "_extra_state": bad, "weight": model[0].weight * 0})
    assert_same_tensors(all_scales(model), before)
    assert_same_tensors(dict(model.named_parameters()), weights)


def test_a_history_of_another_length_loads(device):
    """Into a module that has not run, and into one that has: its recipe's length holds, the newest amaxes stay."""
    short, long = (te.Linear(16, 16, device=device) for _ in range(2))
    seen = [2.0**i for i in range(3)]
    for amax in seen:
        step(short, torch.full((2, 16), amax, device=device), RECIPES["delayed"](amax_history_len=4))
    step(long, torch.ones(2, 16, device=device), RECIPES["delayed"](amax_history_len=6))
    for module in (te.Linear(16, 16, device=device), long):
        module.load_state_dict(short.state_dict())
        assert_same_bits(module.fp8_meta["scaling_fwd"].scale, short.fp8_meta["scaling_fwd"].scale)
        step(module, torch.full((2, 16), 0.5, device=device), RECIPES["delayed"](amax_history_len=6))
        assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0, 0, *seen, 0.5]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alone(device, how):
    made = RECIPES["delayed"]()
    model, optimizer = new(device)
    batches = [randn(8, 16, device=device, scale=1.5**i) for i in range(4)]
    run(model, optimizer, batches[:2], made)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    before = all_scales(other)
    run(model, optimizer, batches[2:], made)
    assert_same_tensors(all_scales(other), before)
    run(other, torch.optim.SGD(other.parameters(), lr=0.01), batches[2:], made)
    assert_same_tensors(dict(other.named_parameters()), dict(model.named_parameters()))
    assert_same_tensors(all_scales(other), all_scales(model))


# ---- other recipes, other lengths ----


def test_the_recipe_may_change_between_steps(device):
    model, optimizer = new(device)
    x = randn(8, 16, device=device)
    for recipe in (*RECIPES, "delayed", "block"):
        run(model, optimizer, [x], RECIPES[recipe]())
        assert ("scaling_fwd" in model[0].fp8_meta) is (recipe == "delayed")
        assert type(model[0].fp8_meta["recipe"]) is type(RECIPES[recipe]())
    fresh, _ = new(device)
    fresh.load_state_dict(model.state_dict())
    for recipe in ("current", "delayed"):  # nothing is left of what came before
        results = []
        for m in (model, fresh):
            with te.autocast(recipe=RECIPES[recipe]()):
                results.append(m(x))
        assert_same_bits(*results)


def test_the_history_may_become_longer_and_shorter(device):
    module = te.Linear(16, 16, device=device)
    inputs = [randn(8, 16, device=device, scale=2.0**-i) for i in range(8)]
    seen = [x.abs().max().item() for x in inputs]
    for i, length in enumerate((4, 4, 4, 6, 6, 2, 2, 3)):
        step(module, inputs[i], RECIPES["delayed"](amax_history_len=length))
    assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0, seen[6], seen[7]]
    module.adjust_amax_history_length(5)
    assert len(module.fp8_meta["scaling_fwd"].amax_history) == len(module.fp8_meta["scaling_bwd"].amax_history) == 5
    module.adjust_amax_history_length(2, fwd=True)
    assert [len(module.fp8_meta[f"scaling_{way}"].amax_history) for way in ("fwd", "bwd")] == [2, 5]
    for wrong in (0, -1, 2.5, True):
        with refused(ValueError, "Linear", "length"):
            module.adjust_amax_history_length(wrong)
    with refused(ValueError, "Linear", "num_gemms", "3", "1"):
        module.init_fp8_metadata(num_gemms=3)


def test_two_recipes_for_one_module_in_one_region(device):
    x = randn(8, 16, device=device)
    for first, second in (("delayed", "block"), ("current", "delayed")):
        module, wanted = (te.Linear(16, 16, device=device) for _ in range(2))
        wanted.load_state_dict(module.state_dict())
        with te.autocast(recipe=RECIPES[first]()):
            y = module(x)
            with te.autocast(recipe=RECIPES[second]()):
                with refused(RuntimeError, "Linear", "DelayedScaling", "outermost autocast"):
                    module(x)
                te.Linear(16, 16, device=device)(x)  # another module may
            assert_same_bits(module(x), y)
    module = te.Linear(16, 16, device=device)
    with te.autocast(recipe=RECIPES["current"]()):
        y = module(x)
        with te.autocast(recipe=RECIPES["block"]()):
            assert not torch.equal(module(x), y)  # neither keeps state
        with te.autocast(enabled=False):
            assert_same_bits(module(x), torch.nn.functional.linear(x, module.weight, module.bias))
        assert_same_bits(module(x), y)


# ---- factories ----


def quantizer_of(role):
    dtype = te.DType.kFloat8E5M2 if role.tensor_type.startswith("grad") else te.DType.kFloat8E4M3
    return te.Float8CurrentScalingQuantizer(dtype, torch.device("cpu"))


def test_a_factory_of_built_in_quantizers_is_the_recipe(device):
    asked = []

    def factory(role):
        asked.append((role.module_type, role.tensor_type, role.name))
        return quantizer_of(role)

    model, _ = new(device)
    model[1].name = "mlp"
    x, results = randn(8, 16, device=device), []
    splits = te.autocast(recipe=Float8CurrentScaling()), te.autocast(recipe=CustomRecipe(qfactory=factory))
    for context in splits:
        model.zero_grad()
        with context:
            y = model(x)
        y.square().sum().backward()
        results.append((y.detach(), grads_of(model)))
    assert_same_bits(results[0][0], results[1][0])
    assert_same_tensors(results[0][1], results[1][1])
    assert ("linear", "weight", "mlp.fc2") in asked and ("linear", "grad_output", "") in asked
    assert len(asked) == 3 * 4  # once for each tensor


def test_a_factory_may_ask_for_delayed_scaling(device):
    model, optimizer = new(device)
    twin, twins = new(device)
    request = te.DelayedScalingRequest(amax_history_len=4)
    batches = [randn(8, 16, device=device, scale=1.5**i) for i in range(3)]
    run(model, optimizer, batches, CustomRecipe(qfactory=lambda role: request))
    run(twin, twins, batches, RECIPES["delayed"]())
    assert_same_tensors(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert_same_tensors(all_scales(model), all_scales(twin))

    def uneven(role):
        return te.DelayedScalingRequest(margin=int(role.tensor_type == "weight"))

    with te.autocast(recipe=CustomRecipe(qfactory=uneven)), refused(NotImplementedError, "CustomRecipe", "qfactory"):
        model(batches[0])


def test_a_factory_may_leave_a_tensor_alone(device):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    with te.autocast(recipe=CustomRecipe(qfactory=lambda role: None)):
        y = module(x)
    assert_same_bits(y, module(x))


# ---- torch.compile ----


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("inside", [True, False], ids=["autocast inside", "autocast around"])
def test_compiled_in_one_graph(device, recipe, inside):
    model, _ = new(device)
    x, made = randn(8, 16, device=device), RECIPES[recipe]()

    def call(t):
        if not inside:
            return model(t)
        with te.autocast(recipe=made):
            return model(t)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with te.autocast(recipe=made) if not inside else te.autocast(enabled=False):
            y = function(x)
        y.square().sum().backward()
        results.append((y.detach(), grads_of(model)))
    assert_same_bits(results[1][0], results[0][0])
    assert_same_tensors(results[1][1], results[0][1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = model(x)
    assert_same_bits(compiled(x), plain)
    for other in (RECIPES[recipe](), Float8BlockScaling(), Float8CurrentScaling()):  # each its own graph
        with te.autocast(recipe=other):
            assert_same_bits(compiled(x), model(x))
    assert_same_bits(compiled(x), plain)


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"recompute_norm_output": True}], ids=str)
def test_a_packed_pre_activation_compiles(device, recipe, activation, options):
    """The backward quantizes the activation of what it unpacks: by the scale of the forward, in both routes."""
    module = te.LayerNormMLP(256, 128, activation=activation, save_preactivation="fp8", device=device, **options)
    x, made = randn(32, 256, device=device, requires_grad=True), RECIPES[recipe]()
    results = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        x.grad = None
        with te.autocast(recipe=made):
            y = function(x)
        y.square().sum().backward()
        results.append({"y": y.detach(), "dx": x.grad, **grads_of(module)})
    assert_same_tensors(results[1], results[0])


# ---- bad input ----


def test_bad_calls_are_named(device):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        for wrong in (torch.tensor(True), 2, "yes"):
            with refused(ValueError, "Linear", "is_first_microbatch", "True, False or None"):
                module(x, is_first_microbatch=wrong)
        with refused(NotImplementedError, "Linear", "fp8_grad"):
            module(x, fp8_grad=True)
    keeping = te.Linear(16, 16, device=device, save_original_input=True)
    with te.autocast(recipe=DelayedScaling()), refused(ValueError, "Linear", "save_original_input"):
        keeping(x)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert_same_bits(keeping(x), torch.nn.functional.linear(x, keeping.weight, keeping.bias) * 0 + keeping(x))


def test_hot_calls_make_no_quantizers(device, monkeypatch):
    """The extension's objects are made once for each product, not for each call."""
    model, x = pair(device), randn(8, 16, device=device)
    for recipe in RECIPES.values():
        made = recipe()
        step(model, x, made)
        monkeypatch.setattr(_C, "Quantizer", None)
        monkeypatch.setattr(_C, "ProductQuantization", None)
        step(model, x, made)
        monkeypatch.undo()
