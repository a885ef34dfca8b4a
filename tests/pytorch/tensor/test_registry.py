# A format with a recipe of its own, added as CONTRIBUTING.md describes: a quantizer that registers the names by which
# recipes call it, and a recipe that names it. Modules, RecipeState, quantized weights find it, without a change
# anywhere else.
import dataclasses

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling, Format, Recipe
from transformer_engine.pytorch.quantization import RecipeState, get_align_size_for_quantization
from transformer_engine.pytorch.quantization.recipes.products import traced_integers
from transformer_engine.pytorch.tensor.registry import SCALINGS

IN, WEIGHT, GRAD = "mine for inputs", "mine for weights", "mine for gradients"


class MyQuantizer(te.Float8CurrentScalingQuantizer, python_written=True):
    _scalings = (IN, WEIGHT, GRAD)

    @classmethod
    def _made_for(cls, wanted):
        made = super()._made_for(wanted)
        made.made_for = wanted.scaling
        return made

    def _get_compatible_recipe(self):
        return MyScaling


@dataclasses.dataclass(repr=False)
class MyScaling(Recipe):
    names: tuple = (IN, WEIGHT, GRAD)
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _alignment = 48

    def _scalings(self):
        return self.names


def run(recipe, device, quantized=False):
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        module = te.Linear(64, 48, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(torch.randn_like(y))
    return module, (y, x.grad, module.weight.grad, module.bias.grad)


def test_a_scaling_belongs_to_the_class_that_registered_it():
    assert {SCALINGS[name] for name in (IN, WEIGHT, GRAD)} == {MyQuantizer}
    assert SCALINGS["current"] is te.Float8CurrentScalingQuantizer
    with refused(ValueError, "Another", repr(GRAD), "MyQuantizer"):
        type("Another", (te.Float8CurrentScalingQuantizer,), {"_scalings": (GRAD,)})
    assert SCALINGS[GRAD] is MyQuantizer


@pytest.mark.parametrize("quantized", [False, True], ids=["", "weights"])
def test_modules_compute_by_a_recipe_that_names_it(device, quantized):
    module, got = run(MyScaling(), device, quantized)
    _, wanted = run(Float8CurrentScaling(), device, quantized)
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)
    names = {key: [q.made_for for q in quantizers] for key, quantizers in module.quantizers.items()}
    assert names == {"scaling_fwd": [IN, WEIGHT, IN], "scaling_bwd": [GRAD, GRAD]}
    dtypes = {key: quantizers[0].dtype for key, quantizers in module.quantizers.items()}
    assert dtypes == {"scaling_fwd": te.DType.kFloat8E4M3, "scaling_bwd": te.DType.kFloat8E5M2}
    assert isinstance(getattr(module.weight, "_quantizer", None), MyQuantizer) == quantized


def test_a_tensor_may_stay_as_it_is(device):
    module, (y, *_) = run(MyScaling(names=("none", "none", GRAD)), device)
    torch.manual_seed(0)
    plain = te.Linear(64, 48, params_dtype=torch.bfloat16, device=device)
    assert_same_bits(y, plain(torch.randn(32, 64, dtype=torch.bfloat16, device=device)))
    assert set(module.quantizers["scaling_fwd"]) == {None}
    assert {q.made_for for q in module.quantizers["scaling_bwd"]} == {GRAD}


def test_recipe_state_and_alignment():
    state = RecipeState.create(MyScaling(), mode="backward", num_quantizers=2, device="cpu")
    assert [q.made_for for q in state.make_quantizers()] == [GRAD, GRAD]
    assert get_align_size_for_quantization(MyScaling()) == 48


def test_an_unregistered_scaling_and_one_that_cannot_be_traced():
    with refused(ValueError, "MyScaling", "'unknown', wanted one of"):
        run(MyScaling(names=("unknown", IN, GRAD)), "cpu")
    with refused(ValueError, "MyScaling", "'delayed', wanted one of"):
        run(MyScaling(names=("delayed", IN, GRAD)), "cpu")
    with refused(NotImplementedError, "MyScaling", IN, "torch.compile"):
        traced_integers(MyScaling())
