# Quantized tensors around a product: weights that are held in FP8 alone (quantized_model_init), outputs that are FP8
# tensors.

import copy

import pytest
import torch
from fp8_steps import RECIPES
from plain_modules import as_tuple
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch import functional

pytestmark = pytest.mark.usefixtures("fp8_left_off")


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_parameters(device, recipe):
    """The same bits as a module whose weight is quantized in each call, from the values that were preserved."""
    made = RECIPES[recipe]()
    with te.quantized_model_init(recipe=made, preserve_high_precision_init_val=True):
        module = te.Linear(64, 48, device=device)
    assert isinstance(module.weight, te.QuantizedTensor) and isinstance(module.weight, torch.nn.Parameter)
    assert type(module.bias) is torch.nn.Parameter and module.primary_weights_in_fp8
    value = module.weight.get_high_precision_init_val()
    assert value.device.type == "cpu" and value.dtype is torch.float32
    assert 0 < (module.weight.dequantize().cpu() - value).norm() < 0.05 * value.norm()
    twin = te.Linear(64, 48, device=device)
    twin.load_state_dict({"weight": value, "bias": module.bias})
    x = randn(32, 64, device=device, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    if recipe == "delayed":  # the weight has its scale from the beginning; the twin's is known after a step
        with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=made):
            twin(torch.ones(1, 64, device=device) * 448)
    with te.autocast(recipe=made):
        y, z = module(x), twin(again)
    assert_same_bits(y, z)
    for out in (y, z):
        out.square().sum().backward()
    assert_same_bits(x.grad, again.grad)
    assert_same_bits(module.weight.grad, twin.weight.grad)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    plain = module(x)  # outside of autocast it computes with the weight's values
    assert_same_bits(plain, functional.linear(x, module.weight.dequantize(), module.bias))
    plain.sum().backward()


def test_quantized_parameters_are_trained(device):
    for recipe in RECIPES:
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPES[recipe]()):
            model = torch.nn.Sequential(te.LayerNormMLP(16, 64, device=device), te.Linear(16, 4, device=device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x, losses = randn(64, 16, device=device), []
        target = torch.tanh(x @ randn(16, 4, device=device))
        for _ in range(60):
            with te.autocast(recipe=RECIPES[recipe]()):
                loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert isinstance(model[1].weight, te.QuantizedTensor) and losses[-1] < 0.5 * losses[0]


def test_quantized_parameters_that_cannot_be_are_named(device):
    with te.quantized_model_init():
        with refused(NotImplementedError, "Linear", "quantized_model_init", "parameters_split"):
            te.Linear(16, 16, parameters_split=["a", "b"], device=device)
        assert type(te.LayerNorm(16, device=device).weight) is torch.nn.Parameter
    with te.quantized_model_init(recipe=Float8BlockScaling()):
        module = te.Linear(16, 16, device=device)
    with te.autocast(recipe=Float8CurrentScaling()), refused(RuntimeError, "Linear", "Float8BlockwiseQTensor"):
        module(randn(4, 16, device=device))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_output(device, recipe):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    made = RECIPES[recipe]()
    for _ in range(2):  # delayed scaling has the output's amax after the first
        with te.autocast(recipe=made):
            y = module(x)
            quantized = module(x, fp8_output=True)
        assert isinstance(quantized, te.QuantizedTensor) and not isinstance(y, te.QuantizedTensor)
    assert 0 < (quantized.dequantize() - y).norm() < 0.05 * y.norm()
    if recipe == "delayed":
        assert module.fp8_meta["scaling_fwd"].amax_history[-1, 2] == y.abs().max()
    module.eval()  # where no backward changes a scale
    with te.autocast(recipe=made):
        y, quantized = module(x), module(x, fp8_output=True)
    dy = randn(8, 16, device=device)
    want = torch.autograd.grad(y, list(module.parameters()), dy)
    for got, wanted in zip(torch.autograd.grad(quantized, list(module.parameters()), dy), want, strict=True):
        assert_same_bits(got, wanted)
    assert not isinstance(module(x, fp8_output=True), te.QuantizedTensor)  # outside of autocast there is no format


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(m.weight.device),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to(torch.float16),
        lambda m: m.cpu(),
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.bfloat16(),
        lambda m: torch.nn.Sequential(m).to(torch.float16),
        lambda m: m.to_empty(device=m.weight.device),
    ],
    ids=["device", "dtype", "cast", "cpu", "half", "float", "bfloat16", "outer", "empty"],
)
def test_a_conversion_keeps_what_is_on_a_quantized_parameter(device, recipe, convert):
    with te.quantized_model_init(recipe=RECIPES[recipe](), preserve_high_precision_init_val=True):
        module = te.Linear(64, 64, device=device, params_dtype=torch.bfloat16)
    weight, calls = module.weight, []
    value, init = weight.dequantize(dtype=torch.float32).cpu(), weight.get_high_precision_init_val()
    weight.main_grad = main_grad = torch.zeros(64, 64, device=device)
    weight.mark, module.bias.mark = "mine", "mine"
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))
    weight.register_hook(lambda grad: calls.append("hook"))
    weight.grad = torch.ones_like(value, dtype=torch.bfloat16, device=device)
    convert(module)
    assert module.weight is weight and isinstance(weight, te.QuantizedTensor) and weight.requires_grad
    assert weight.mark == module.bias.mark == "mine" and weight.main_grad is main_grad
    assert weight.tensor_model_parallel is False and weight.partition_dim == -1
    assert weight.get_high_precision_init_val() is init
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    assert weight.dtype is weight.grad.dtype is module.bias.dtype and weight.device == weight.grad.device
    if "to_empty" not in convert.__code__.co_names:
        assert_same_bits(weight.dequantize(dtype=torch.float32).cpu(), value)
        assert (weight.grad == 1).all()
    weight.grad = None
    with te.autocast(recipe=RECIPES[recipe]()):
        y = module(torch.ones(4, 64, device=weight.device, dtype=weight.dtype))
    y.sum().backward()
    assert calls == ["hook", weight.dtype] and weight.grad.dtype is weight.dtype


def test_a_conversion_that_changes_nothing_copies_nothing(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        module = te.Linear(64, 64, device=device)
    data = module.weight._data
    module.to(device).float()
    module.to(device=device, dtype=torch.float32)
    assert module.weight._data is data


def test_a_quantized_parameter_leaves_the_meta_device_with_its_marks(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        module = te.Linear(64, 64, device=device)
    weight = module.weight
    weight.mark = "mine"
    module.to("meta")
    assert module.weight.device.type == "meta" and module.weight.mark == "mine"
    module.to_empty(device=device)
    assert module.weight.device.type == torch.device(device).type and module.weight.mark == "mine"
    assert isinstance(module.weight, te.QuantizedTensor) and module.weight.tensor_model_parallel is False


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "residual"])
def test_a_quantized_input_is_its_values(device, recipe, dtype, kind):
    """A module gives the same bits for a quantized output and for the same output dequantized, and the gradient passes
    to the module before."""
    made, options = RECIPES[recipe](), {"device": device, "params_dtype": dtype}
    build = {
        "Linear": lambda: te.Linear(64, 48, **options),
        "LayerNormLinear": lambda: te.LayerNormLinear(64, 48, return_layernorm_output=True, **options),
        "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, return_layernorm_output=True, **options),
    }.get(kind, lambda: te.LayerNormMLP(64, 96, **options))
    module = build()
    before = te.Linear(64, 64, **options)
    x = randn(32, 64, device=device, dtype=dtype)
    results = {}
    for values in (False, True):
        first, second = copy.deepcopy(before), copy.deepcopy(module)
        for _ in range(3):  # delayed scaling has the amaxes after the first
            source = x.clone().requires_grad_()
            with te.autocast(recipe=made):
                quantized = first(source, fp8_output=True)
                assert isinstance(quantized, te.QuantizedTensor)
                given = quantized.dequantize() if values else quantized
                out = second(x, residual=given) if kind == "residual" else second(given)
            wanted = [source, *first.parameters(), *second.parameters()]
            loss = sum((t.float() * torch.linspace(-1, 2, t.shape[-1], device=device)).sum() for t in as_tuple(out))
            grads = torch.autograd.grad(loss, wanted)
        results[values] = [*as_tuple(out), *grads]
    assert results[True][len(as_tuple(out))].abs().max() > 0
    for got, wanted in zip(results[False], results[True], strict=True):
        assert not isinstance(got, te.QuantizedTensor)
        assert_same_bits(got, wanted)
    with te.autocast(enabled=False):
        second(quantized.detach())


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_parameters_under_compile_are_refused_by_name(device, recipe, fullgraph):
    """With fullgraph the error is part of torch's; without, a graph break must not end inside of torch's tracer."""
    made, x = RECIPES[recipe](), randn(8, 16, device=device)
    for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
        with te.quantized_model_init(recipe=made):
            module = make(16, 32, device=device)
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=fullgraph, backend="aot_eager")
        kind = Exception if fullgraph else NotImplementedError
        with pytest.raises(kind, match=f"{make.__name__}: .*quantized_model_init.* under torch.compile; keep"):
            with te.autocast(recipe=made):
                compiled(x)
        torch.compiler.reset()
        assert_same_bits(compiled(x), module(x))  # by its values, outside of autocast


def test_the_dtype_of_a_weight_counts_beside_its_fp8_copy(device):
    """As for a plain weight. Under torch.autocast it is the dtype of the cast."""
    x = randn(8, 16, device=device, dtype=torch.bfloat16)
    for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            module = make(16, 32, device=device)
        for other in (module, make(16, 32, device=device)):
            for name, parameter in other.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.data = parameter.data.bfloat16()
            with (
                te.autocast(recipe=Float8CurrentScaling()),
                refused(ValueError, "'inp'", "weight'", "torch.float32", "torch.bfloat16", "torch.autocast"),
            ):
                other(x, is_first_microbatch=True)
            with te.autocast(recipe=Float8CurrentScaling()), torch.autocast(device, torch.bfloat16):
                assert other(x, is_first_microbatch=True).dtype is torch.bfloat16
