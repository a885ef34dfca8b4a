# The recipes as plain data: defaults, checks, equality, copies, subclasses.
import copy
import inspect

import pytest
from support import refused

from transformer_engine.common import recipe
from transformer_engine.common.recipe import Format, MMParams, QParams


def factory(role):
    return role


RECIPES = {
    recipe.DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    recipe.Float8CurrentScaling: {
        "fp8_format": Format.HYBRID,
        "fp8_quant_fwd_inp": QParams(),
        "fp8_quant_fwd_weight": QParams(),
        "fp8_quant_bwd_grad": QParams(),
        "fp8_gemm_fprop": MMParams(use_split_accumulator=False),
        "fp8_gemm_dgrad": MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": MMParams(use_split_accumulator=True),
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    recipe.Float8BlockScaling: {
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_quant_fwd_inp": QParams(power_2_scale=True),
    },
    recipe.MXFP8BlockScaling: {"margin": 0, "fp8_format": Format.E4M3, "enable_2d_quantization": False},
    recipe.NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": False,
        "fp8_format": Format.E4M3,
    },
    recipe.CustomRecipe: {"qfactory": factory, "fp8_format": Format.HYBRID, "quantization_alignment": 128},
}
PREDICATES = {
    "delayed": recipe.DelayedScaling,
    "float8_current_scaling": recipe.Float8CurrentScaling,
    "float8_block_scaling": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": recipe.CustomRecipe,
}
every_recipe = pytest.mark.parametrize("cls", RECIPES, ids=lambda cls: cls.__name__)


def make(cls, **kwargs):
    return cls(**({"qfactory": factory} if cls is recipe.CustomRecipe else {}), **kwargs)


@every_recipe
def test_defaults_and_unknown_keywords(cls):
    made = make(cls, interval=4, override_linear_precision=(False, False, True))
    for name, value in RECIPES[cls].items():
        assert getattr(made, name) == value, name
        assert name in inspect.signature(cls.__init__).parameters
    assert made.backward_override is None and not hasattr(made, "interval")


@every_recipe
def test_equality_copies_and_repr(cls):
    made, changed = make(cls), make(cls, fp8_format=Format.E5M2)
    assert made == make(cls) and made != changed and made != object()
    assert copy.deepcopy(made) == made and copy.deepcopy(made) is not made
    assert repr(made).startswith(f"recipe_type={cls.__name__}, ") and "fp8_format=E5M2" in repr(changed)
    for other in RECIPES:
        assert cls is other or made != make(other)


@every_recipe
def test_predicates(cls):
    made = make(cls)
    for name, owner in PREDICATES.items():
        assert getattr(made, name)() == (cls is owner), name
        assert getattr(cls, name)() == (cls is owner), name
    assert made.float8_per_tensor_scaling() == (cls in (recipe.DelayedScaling, recipe.Float8CurrentScaling))


@every_recipe
def test_checks(cls):
    wrong = {"fp8_format": ("E9M9", 3, None), "backward_override": ("sometimes", 1)}
    wrong |= dict.fromkeys(("fp8_dpa", "fp8_mha", "reduce_amax", "disable_rht"), ("yes", 1, None))
    wrong |= {"margin": (-1, "0", 0.5, True, 128), "amax_history_len": (0, -3, 1.5, "16", None)}
    wrong |= {"amax_compute_algo": ("mean", 3), "scaling_factor_compute_algo": ("max", 1)}
    wrong |= {"fp8_gemm_fprop": (True, QParams()), "fp8_quant_fwd_inp": (MMParams(), "p2")}
    wrong |= {"x_block_scaling_dim": (0, 3, "1"), "qfactory": (None, "f"), "quantization_alignment": (0, "16")}
    known = inspect.signature(cls.__init__).parameters
    checked = [name for name in wrong if name in known]
    assert len(checked) >= 3
    for name in checked:
        for value in wrong[name]:
            given = {"qfactory": factory, name: value} if cls is recipe.CustomRecipe else {name: value}
            with refused(ValueError, cls.__name__, f"'{name}'", repr(value), "wanted"):
                cls(**given)
            made = make(cls)
            with refused(ValueError, cls.__name__, f"'{name}'", repr(value), "wanted"):
                setattr(made, name, value)  # later is no other than at once
            assert made == make(cls)


def test_parameters_of_products_and_tensors():
    for value in ("yes", 1, None):
        for cls, name in (
            (MMParams, "use_split_accumulator"),
            (QParams, "power_2_scale"),
            (QParams, "stochastic_rounding"),
        ):
            with refused(ValueError, cls.__name__, f"'{name}'", repr(value), "True or False"):
                cls(**{name: value})
    for value in (-1.0, float("nan"), float("inf"), 1e39, "1", True):
        with refused(ValueError, "QParams", "'amax_epsilon'", repr(value), "a float32"):
            QParams(amax_epsilon=value)


def test_what_is_accepted():
    delayed = recipe.DelayedScaling(2, "E4M3", 16, "most_recent", lambda *_: None, False)
    assert (delayed.margin, delayed.fp8_format, delayed.amax_history_len) == (2, Format.E4M3, 16)
    assert recipe.DelayedScaling(amax_compute_algo=max).amax_compute_algo is max
    assert recipe.MXFP8BlockScaling(backward_override="dequantized").backward_override == "dequantized"
    with refused(ValueError, "DelayedScaling", "'backward_override'"):
        recipe.DelayedScaling(backward_override="dequantized")
    with pytest.raises(TypeError, match="qfactory"):
        recipe.CustomRecipe()


def test_subclasses_with_their_own_init():
    class Client(recipe.DelayedScaling):
        def __init__(self, config, fp8_format, override_linear_precision=(False, False, False)):
            super().__init__(
                margin=config["margin"],
                fp8_format=fp8_format,
                amax_history_len=4,
                override_linear_precision=override_linear_precision,
                reduce_amax=False,
            )

    made = Client({"margin": 1}, Format.E4M3)
    assert (made.margin, made.amax_history_len, made.reduce_amax) == (1, 4, False)
    assert made.delayed() and made == Client({"margin": 1}, Format.E4M3) and made != Client({"margin": 2}, Format.E4M3)
    assert repr(made).startswith("recipe_type=Client, margin=1") and copy.deepcopy(made) == made
    with refused(ValueError, "Client", "'margin'", "-1"):
        Client({"margin": -1}, Format.E4M3)


def test_formats():
    assert [f.name for f in Format] == ["E2M1", "E4M3", "E5M2", "HYBRID"]
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert Format.E5M2.value.max_fwd == Format.E5M2.value.max_bwd == 57344 and Format.E2M1.value.max_fwd == 6


def test_scales_that_are_not_powers_of_two(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert not recipe.Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    assert recipe.Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale
