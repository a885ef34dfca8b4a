# RecipeState: the quantizers that clients make for a recipe give the bytes of a module's own, and delayed scales move
# as those of a module; and what a format means for a tensor.
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import quantization as Q

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")
SLOTS = {"forward": FORWARD, "backward": BACKWARD}
BLOCKS = R.Float8BlockScaling(fp8_quant_fwd_weight=R.QParams(amax_epsilon=0.5))


def factory(role):
    if role.tensor_type == "weight":
        return te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
    if role.tensor_type == "input":
        return Q.DelayedScalingRequest(amax_history_len=4)
    return None if role.tensor_type == "output" else te.Float8CurrentScalingQuantizer(E5M2)


RECIPES = {
    "delayed": R.DelayedScaling(amax_history_len=4),
    "current": R.Float8CurrentScaling(fp8_quant_fwd_inp=R.QParams(power_2_scale=True)),
    "block": BLOCKS,
    "custom": R.CustomRecipe(factory),
}


@pytest.mark.usefixtures("fp8_left_off")
@pytest.mark.parametrize("mode", SLOTS)
@pytest.mark.parametrize("kind", RECIPES)
def test_quantizers_are_those_of_a_module(kind, mode, device):
    """Of a layer with two products, after its first forward, tensor by tensor."""
    module = te.LayerNormMLP(16, 32, device=device)
    with te.autocast(recipe=RECIPES[kind]):
        module(randn(4, 16, device=device))
    wanted = module.quantizers["scaling_fwd" if mode == "forward" else "scaling_bwd"]
    state = Q.RecipeState.create(RECIPES[kind], mode=mode, num_quantizers=len(wanted), device=device)
    made = state.make_quantizers()
    assert isinstance(state, Q.RecipeState) and len(made) == len(wanted)
    assert (state.mode, state.num_quantizers, state.recipe) == (mode, len(wanted), RECIPES[kind])
    x = randn(48, 64, dtype=torch.bfloat16, device=device)
    for ours, theirs in zip(made, wanted, strict=True):
        assert type(ours) is type(theirs)
        if ours is None:
            continue
        if isinstance(theirs, te.Float8Quantizer):  # whose scale has moved
            theirs.scale.fill_(1)
        got, want = ours(x), theirs(x)
        assert got.get_usages() == want.get_usages() == {"rowwise": True, "columnwise": True}
        for name, part in got._tensors().items():
            assert_same_bits(part, want._tensors()[name], name)


def test_classes_and_element_types():
    classes = {
        "delayed": Q.DelayedScalingRecipeState,
        "current": Q.Float8CurrentScalingRecipeState,
        "block": Q.Float8BlockScalingRecipeState,
        "custom": Q.CustomRecipeState,
    }
    for kind, cls in classes.items():
        for mode, dtype in (("forward", E4M3), ("backward", E4M3 if kind == "block" else E5M2)):
            state = Q.RecipeState.create(RECIPES[kind], mode=mode, device="cpu")
            assert type(state) is cls and state.dtype is dtype and len(state.make_quantizers()) == 1
            assert type(cls(RECIPES[kind], mode=mode, device="cpu")) is cls

    class Mine(R.DelayedScaling):
        pass

    assert type(Q.RecipeState.create(Mine(), mode="forward", device="cpu")) is Q.DelayedScalingRecipeState


@pytest.mark.usefixtures("fp8_left_off")
def test_delayed_scales_move_with_a_region(device):
    """scale_n = 448 / amax over the history; the next tensor is quantized by it."""
    state = Q.RecipeState.create(RECIPES["delayed"], mode="forward", num_quantizers=3, device=device)
    assert state.scale.shape == (3,) and state.amax_history.shape == (4, 3)
    meta = {"scaling_fwd": state, "fp8_group": None}
    of_input, of_weight, _ = state.make_quantizers()
    x, w = randn(8, 16, device=device), randn(16, 16, device=device)
    with te.autocast(recipe=RECIPES["delayed"]):
        of_input(x)
        of_weight(w)
        Q.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        assert_same_bits(state.amax_history[0], torch.stack([x.abs().max(), w.abs().max(), x.new_zeros(())]))
    assert_same_bits(state.amax_history[0], torch.zeros(3, device=device))
    wanted = torch.stack([448 / x.abs().max(), 448 / w.abs().max(), x.new_ones(())])
    assert_same_bits(state.scale, wanted)
    assert_same_bits(of_input(x)._scale_inv, wanted[:1].reciprocal())


def test_a_factory_with_delayed_scaling_has_columns_of_its_own(device):
    state = Q.RecipeState.create(RECIPES["custom"], mode="forward", num_quantizers=6, device=device)
    made = state.make_quantizers()
    again = state.make_quantizers()
    x = randn(8, 16, device=device)
    made[3](x)
    amaxes = x.new_zeros(6)
    amaxes[3] = x.abs().max()
    assert_same_bits(state.scaling.amax_history[0], amaxes)
    assert_same_bits(again[3].amax, amaxes[3:4])


def test_refused_by_name():
    delayed = RECIPES["delayed"]
    with refused(ValueError, "RecipeState.create", "'recipe'", "a recipe of"):
        Q.RecipeState.create("delayed", mode="forward")
    with refused(ValueError, "RecipeState.create", "'recipe'", "Recipe"):
        Q.RecipeState.create(R.Recipe(), mode="forward")
    with refused(ValueError, "DelayedScalingRecipeState", "'mode'", "sideways", "'backward'"):
        Q.RecipeState.create(delayed, mode="sideways")
    with refused(ValueError, "DelayedScalingRecipeState", "'num_quantizers'", "-1"):
        Q.RecipeState.create(delayed, mode="forward", num_quantizers=-1)
    with refused(ValueError, "DelayedScalingRecipeState", "'recipe'", "Float8CurrentScaling", "create"):
        Q.DelayedScalingRecipeState(RECIPES["current"], mode="forward")
    for kind in (R.MXFP8BlockScaling, R.NVFP4BlockScaling):
        with refused(NotImplementedError, kind.__name__, "Blackwell"):
            Q.RecipeState.create(kind(), mode="forward")
    with refused(ValueError, "CustomRecipe", "'qfactory'", "'fp8'"):
        Q.RecipeState.create(R.CustomRecipe(lambda role: "fp8"), mode="forward", device="cpu").make_quantizers()
    lengths = iter(range(1, 9))
    unequal = R.CustomRecipe(lambda role: Q.DelayedScalingRequest(amax_history_len=next(lengths)))
    with refused(NotImplementedError, "CustomRecipe", "'qfactory'", "different ways"):
        Q.RecipeState.create(unequal, mode="forward", num_quantizers=2, device="cpu").make_quantizers()


# ---- what a format means ----


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        (R.DelayedScaling(), E4M3, E5M2),
        (R.DelayedScaling(fp8_format=R.Format.E4M3), E4M3, E4M3),
        (R.Float8CurrentScaling(fp8_format=R.Format.E5M2), E5M2, E5M2),
        (R.Float8BlockScaling(), E4M3, E4M3),
        (R.CustomRecipe(factory), E4M3, E5M2),
    ],
    ids=["delayed", "delayed E4M3", "current E5M2", "block", "custom"],
)
def test_element_types_and_their_largest_values(recipe, forward, backward):
    for dtype, way in ((forward, ()), (forward, (True,)), (backward, (False,))):
        plain, largest = (torch.float8_e4m3fn, 448.0) if dtype is E4M3 else (torch.float8_e5m2, 57344.0)
        assert Q.get_fp8_te_dtype(recipe, *way) is dtype
        assert Q.get_fp8_torch_dtype(recipe, *way) is plain
        assert Q.get_fp8_max(recipe, *way) == largest


def test_alignment():
    sizes = {recipe: Q.get_align_size_for_quantization(recipe()) for recipe in (R.DelayedScaling, R.Float8BlockScaling)}
    assert set(sizes.values()) == {16} == {Q.get_align_size_for_quantization(R.Float8CurrentScaling())}
    assert Q.get_align_size_for_quantization(R.MXFP8BlockScaling()) == 32
    assert Q.get_align_size_for_quantization(R.NVFP4BlockScaling()) == 128
    assert Q.get_align_size_for_quantization(R.CustomRecipe(factory, quantization_alignment=64)) == 64
    assert Q.get_align_size_for_quantization(R.CustomRecipe(factory)) == 128


def test_values_other_than_recipes():
    for function in (Q.get_fp8_torch_dtype, Q.get_fp8_te_dtype, Q.get_fp8_max, Q.get_align_size_for_quantization):
        with refused(ValueError, "'recipe'", "wanted a recipe of"):
            function(R.Format.E4M3)
        with refused(ValueError, "'recipe'", "E2M1", "HYBRID"):
            function(R.DelayedScaling(fp8_format=R.Format.E2M1))
