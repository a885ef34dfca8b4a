# Contexts and the questions about them, without a product: what holds inside, what holds again behind, which recipes
# are refused and where.
import copy
import dataclasses

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from transformer_engine.pytorch import fp8
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantization.recipes.products import plan_of

STATE = FP8GlobalStateManager


def old(name, *args, **kwargs):
    with pytest.warns(DeprecationWarning, match=name):
        return getattr(te, name)(*args, **kwargs)


OFF = {
    "autocast": lambda: te.autocast(enabled=False),
    "autocast with a recipe": lambda: te.autocast(enabled=False, recipe=DelayedScaling()),
    "autocast with a recipe for other machines": lambda: te.autocast(enabled=False, recipe=MXFP8BlockScaling()),
    "fp8_autocast": lambda: old("fp8_autocast", enabled=False, fp8_recipe=DelayedScaling()),
    "quantized_model_init": lambda: te.quantized_model_init(enabled=False),
    "fp8_model_init": lambda: old("fp8_model_init", enabled=False),
    "get_cpu_offload_context": lambda: te.get_cpu_offload_context()[0],
    "onnx_export": lambda: te.onnx_export(),
}


@pytest.mark.parametrize("name", OFF)
def test_switched_off_nothing_changes(device, name):
    torch.manual_seed(0)
    wanted = te.Linear(8, 8, device=device)
    x = randn(4, 8, device=device)
    torch.manual_seed(0)
    with OFF[name](), torch.autocast(device, enabled=False):
        module = te.Linear(8, 8, device=device)
        with OFF[name]():
            got = module(x)
    assert_same_bits(got, wanted(x))
    assert type(module.weight) is torch.nn.Parameter and not module.fp8
    with pytest.raises(KeyError), OFF[name]():
        raise KeyError


def test_switched_off_under_compile():
    linear, x = te.Linear(8, 8, device="cpu"), randn(4, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(t):
        with te.autocast(enabled=FP8GlobalStateManager.is_fp8_enabled()), te.fp8_autocast(enabled=False):
            return linear(t)

    assert_same_bits(call(x), linear(x))
    assert not STATE.is_fp8_enabled()


def said():
    return (STATE.is_fp8_enabled(), STATE.is_fp8_calibration(), STATE.get_fp8_recipe(), STATE.get_fp8_group())


def test_contexts_nest_and_restore_the_outer_settings():
    outside = said()
    assert outside == (False, False, te.get_default_recipe(), None)
    current, block, group = Float8CurrentScaling(), Float8BlockScaling(), object()
    with te.autocast(recipe=current, amax_reduction_group=group):
        assert said() == (True, False, current, group) and STATE.get_fp8_recipe() is current
        with te.autocast(enabled=False, calibrating=True):
            assert said() == (False, True, te.get_default_recipe(), None)
            with pytest.raises(KeyError), te.autocast(recipe=block):
                assert STATE.get_fp8_recipe() is block
                raise KeyError
            assert said()[:2] == (False, True)
        assert said() == (True, False, current, group)
    assert said() == outside


def test_with_gives_the_context():
    context = te.autocast(recipe=Float8CurrentScaling())
    with context as inside, old("fp8_autocast") as older:
        assert inside is context and type(older) is te.autocast


def test_an_instance_may_be_entered_again_but_not_inside_itself():
    context = te.autocast(recipe=Float8CurrentScaling())
    for _ in range(2):
        with context:
            with refused(RuntimeError, "autocast", "entered and not left"), context:
                pass
            assert STATE.is_fp8_enabled()
    assert not STATE.is_fp8_enabled()


def test_the_first_module_of_a_region_is_asked_for_once():
    assert not STATE.is_first_fp8_module()
    for _ in range(2):
        with te.autocast():
            with te.autocast():
                assert STATE.is_first_fp8_module()
            assert not STATE.is_first_fp8_module()
            with te.autocast():
                assert not STATE.is_first_fp8_module()


def test_state_is_handed_over_and_reset():
    recipe = Float8BlockScaling()
    with te.autocast(recipe=recipe, _graph=True):
        held = STATE.get_fp8_autocast_state()
        assert STATE.fp8_graph_capturing()
    assert not STATE.fp8_graph_capturing()
    STATE.set_fp8_autocast_state(held)
    try:
        assert STATE.is_fp8_enabled() and STATE.get_fp8_recipe() is recipe and STATE.fp8_graph_capturing()
    finally:
        STATE.reset()
    assert said() == (False, False, te.get_default_recipe(), None) and not STATE.fp8_graph_capturing()


def test_reset_inside_of_contexts_ends_them(device):
    """Leaving them puts nothing back, and delayed scaling goes on as in a new process."""
    module, recipe, x = (
        te.Linear(16, 16, device=device),
        DelayedScaling(amax_history_len=1),
        randn(8, 16, device=device),
    )
    nothing = (False, False, te.get_default_recipe(), None)

    def scale_after(factor):
        with te.autocast(recipe=recipe):
            y = module(x * factor)
        y.sum().backward()
        return module.fp8_meta["scaling_fwd"].scale[0].item()

    first = scale_after(1.0)
    with te.autocast(recipe=Float8CurrentScaling()), te.autocast(recipe=recipe, _graph=True):
        STATE.reset()
        assert said() == nothing
        with te.autocast(recipe=recipe):  # the outermost one now
            module(x)
            assert said()[:3] == (True, False, recipe)
        assert scale_after(2.0) == first / 2
        assert said() == nothing
    assert said() == nothing and not STATE.fp8_graph_capturing()
    assert scale_after(4.0) == first / 4
    assert not STATE.is_first_fp8_module()
    with te.quantized_model_init(), te.quantized_model_init():
        STATE.reset()
        assert not STATE.with_fp8_parameters()
    assert not STATE.with_fp8_parameters()


def test_reset_inside_of_a_recomputation(device):
    module, recipe, calls = te.Linear(16, 16, device=device), Float8CurrentScaling(), []

    def call(x):
        y = module(x)
        if calls:
            STATE.reset()
        calls.append(y)
        return y

    with te.autocast(recipe=recipe):
        y = te.checkpoint(call, randn(8, 16, device=device, requires_grad=True))
    y.sum().backward()
    assert len(calls) == 2 and said() == (False, False, te.get_default_recipe(), None)
    with te.autocast(recipe=recipe):
        assert STATE.is_first_fp8_module()  # the outermost one


def test_model_init_sets_its_flags_and_resets_them():
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        assert STATE.with_fp8_parameters() and STATE.with_high_precision_init_val()
        with te.quantized_model_init(enabled=False):
            assert not STATE.with_fp8_parameters()
        assert STATE.with_fp8_parameters()
    assert not STATE.with_fp8_parameters() and not STATE.with_high_precision_init_val()


def test_the_flag_for_cached_weights_stays_in_place():
    assert STATE.get_skip_fp8_weight_update_tensor() is None
    try:
        STATE.set_skip_fp8_weight_update_tensor(True)
        flag = STATE.get_skip_fp8_weight_update_tensor()
        assert flag.dtype is torch.float32 and flag.tolist() == [1.0]
        STATE.set_skip_fp8_weight_update_tensor(False)
        assert STATE.get_skip_fp8_weight_update_tensor() is flag and flag.tolist() == [0.0]
    finally:
        STATE.set_skip_fp8_weight_update_tensor(None)
    assert STATE.get_skip_fp8_weight_update_tensor() is None


def test_a_value_other_than_a_recipe_is_refused():
    for recipe in ("DelayedScaling", DelayedScaling, 1):
        with refused(ValueError, "autocast", "recipe", "transformer_engine.common.recipe"):
            te.autocast(recipe=recipe)
        words = "quantized_model_init", "recipe", "transformer_engine.common.recipe"
        with refused(ValueError, *words), te.quantized_model_init(recipe=recipe):
            pass


@pytest.mark.parametrize("value", [None, "yes", 2, Float8CurrentScaling()], ids=["none", "text", "2", "recipe"])
def test_a_value_other_than_a_flag_is_refused(value):
    for context, name in (
        (te.autocast, "enabled"),
        (te.autocast, "calibrating"),
        (te.quantized_model_init, "enabled"),
    ):
        with refused(ValueError, context.__name__, f"'{name}'", "True or False"), context(**{name: value}):
            pass


REFUSED = {
    "MXFP8": (MXFP8BlockScaling(), ("MXFP8BlockScaling", "Blackwell")),
    "NVFP4": (NVFP4BlockScaling(), ("NVFP4BlockScaling", "Blackwell")),
    "fp8_dpa": (DelayedScaling(fp8_dpa=True), ("fp8_dpa", "attention")),
    "fp8_mha": (Float8CurrentScaling(fp8_mha=True), ("fp8_mha", "attention")),
    "E5M2": (DelayedScaling(fp8_format=Format.E5M2), ("fp8_format", "E5M2", "HYBRID")),
    "E2M1": (Float8CurrentScaling(fp8_format=Format.E2M1), ("fp8_format", "E2M1")),
    "transform": (
        Float8CurrentScaling(fp8_quant_fwd_inp=QParams(random_hadamard_transform=True)),
        ("Float8CurrentScaling", "Hadamard"),
    ),
    "2D x 2D": (Float8BlockScaling(x_block_scaling_dim=2), ("Float8BlockScaling", "128 x 128", "(2, 2, 1)")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_cannot_be_honoured_is_refused_where_a_module_uses_it(name):
    recipe, words = REFUSED[name]
    linear, x = te.Linear(8, 8, device="cpu"), randn(4, 8)
    wanted, before = linear(x), copy.copy(linear.__dict__)
    with te.autocast(recipe=recipe):  # no error yet
        with refused(NotImplementedError, "not available in this version", *words):
            linear(x)
    assert {k: v for k, v in linear.__dict__.items() if k != "fp8_meta"} == {
        k: v for k, v in before.items() if k != "fp8_meta"
    }
    assert_same_bits(linear(x), wanted)


def test_blocks_are_accumulated_in_float32():
    recipe = Float8BlockScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=False))
    with refused(ValueError, "Float8BlockScaling", "fp8_gemm_fprop", "use_split_accumulator"):
        plan_of(recipe)


def test_equal_recipes_have_one_plan_and_changed_ones_another():
    recipe = DelayedScaling(amax_history_len=4)
    plan = plan_of(recipe)
    assert plan_of(DelayedScaling(amax_history_len=4)) is plan and plan_of(copy.deepcopy(recipe)) is plan
    recipe.amax_history_len = 8
    changed = plan_of(recipe)
    assert changed is not plan and (plan.rule.amax_history_len, changed.rule.amax_history_len) == (4, 8)
    assert plan_of(Float8CurrentScaling()) is not plan_of(Float8BlockScaling())


def test_plans_are_few_however_many_recipes_come():
    for length in range(1, 1000):
        plan_of(DelayedScaling(amax_history_len=length))
    from transformer_engine.pytorch.quantization.recipes import products

    assert len(products._plans) <= products._MOST_PLANS


SPECS = {
    "current": (Float8CurrentScaling(), [[2, 0, 0, 0], [2, 0, 0, 0], [2, 1, 0, 0]], [0, 1, 1]),
    "current E4M3": (
        Float8CurrentScaling(fp8_format="E4M3", fp8_quant_bwd_grad=QParams(power_2_scale=True, amax_epsilon=1.0)),
        [[2, 0, 0, 0], [2, 0, 0, 0], [2, 0, 1, 0x3F800000]],
        [0, 1, 1],
    ),
    "block": (Float8BlockScaling(), [[3, 0, 1, 0], [4, 0, 1, 0], [3, 0, 1, 0]], [1, 1, 1]),
    "block, 1 x 128 weights": (
        Float8BlockScaling(w_block_scaling_dim=1, fp8_quant_fwd_weight=QParams()),
        [[3, 0, 1, 0], [3, 0, 0, 0], [3, 0, 1, 0]],
        [1, 1, 1],
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_product_specs_of_a_recipe(name):
    recipe, specs, splits = SPECS[name]
    assert list(plan_of(recipe).quantization.spec) == [n for part in (*specs, splits, [0]) for n in part]
    for number, word in enumerate(("high_precision", "dequantized"), 1):
        other = plan_of(dataclasses.replace(recipe, backward_override=word)).quantization
        assert list(other.spec) == [n for part in (*specs, splits, [number]) for n in part]


def test_a_factory_answers_with_quantizers_or_requests():
    with refused(ValueError, "DelayedScaling", "margin"):
        te.DelayedScalingRequest(margin=-1)
    role = te.QuantizerRole("linear", "weight", "fc1")
    assert (role.module_type, role.tensor_type, role.name) == ("linear", "weight", "fc1")
    assert te.QuantizerRole("linear", "weight", "fc1") == role
    assert issubclass(te.DelayedScalingRequest, te.QuantizerRequest)
    linear = te.Linear(8, 8, device="cpu")
    with te.autocast(recipe=CustomRecipe(qfactory=lambda role: "fp8")):
        with refused(ValueError, "CustomRecipe", "qfactory", "'fp8'", "QuantizerRole"):
            linear(randn(4, 8))


def test_every_question_is_answered():
    for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available"):
        ask = getattr(te, name)
        available, reason = ask(return_reason=True)
        assert ask() is available and ask.__name__ == name and bool(reason) is not available
    if not torch.cuda.is_available():
        assert te.is_fp8_available() and te.is_fp8_block_scaling_available()
    for check in (te.is_mxfp8_available, te.is_nvfp4_available):
        available, reason = check(return_reason=True)
        assert available is False and "Blackwell" in reason
    assert fp8.check_fp8_support() == te.is_fp8_available(return_reason=True)
    assert te.fp8.check_mxfp8_support() == te.is_mxfp8_available(return_reason=True)
    assert fp8.FP8GlobalStateManager is STATE and STATE.is_fp8_available() == fp8.check_fp8_support()
    assert te.get_default_recipe().delayed()


@pytest.mark.parametrize(
    ("capability", "available"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)]
)
def test_the_answer_depends_on_the_gpu(monkeypatch, capability, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    got, reason = te.is_fp8_available(return_reason=True)
    assert got is available and (available or "9.0" in reason)


def test_offload_switched_off():
    context, sync = te.get_cpu_offload_context(False, 2, model_layers=4)
    x = randn(3)
    with context:
        assert not is_cpu_offload_enabled()
    assert sync(x) is x
    te.mark_not_offload(x, None)
    with refused(NotImplementedError, "onnx_export", "not available in this version"):
        te.onnx_export(enabled=True).__enter__()
