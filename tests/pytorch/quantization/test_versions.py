# A write of the engine is detected by a backward that has saved the tensor: weights held in FP8 alone raise between
# forward and backward as plain ones do, and a kept copy that a later microbatch makes again leaves the earlier one its
# own.
import copy

import pytest
import torch
from fp8_steps import RECIPES
from quantized_cases import FORMATS, FP8_FORMATS, parts_of
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

pytestmark = pytest.mark.usefixtures("fp8_left_off")
CHANGED = "modified by an inplace operation"

MODULES = {
    "Linear": lambda device: te.Linear(32, 32, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(32, 32, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(32, 48, device=device),
    "recomputing LayerNormMLP": lambda device: te.LayerNormMLP(32, 48, checkpoint=True, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        32, 2, fuse_qkv_params=True, attention_dropout=0.0, device=device
    ),
}


def sgd(weight, foreach):
    weight.grad = torch.ones_like(weight.dequantize())
    torch.optim.SGD([weight], 0.5, foreach=foreach).step()


CHANGES = {
    "zero_": lambda w, y: w.zero_(),
    "copy_": lambda w, y: w.copy_(y),
    "copy_ of quantized": lambda w, y: w.copy_(w.detach().clone()),
    "add_": lambda w, y: w.add_(y),
    "quantize_": lambda w, y: w.quantize_(y),
    "update_quantized": lambda w, y: w._quantizer.update_quantized(y, w.detach()),
    "with a flag": lambda w, y: w.quantize_(y, noop_flag=torch.zeros(1, device=w.device)),
    ".data =": lambda w, y: setattr(w, "data", y),
    "through .data": lambda w, y: w.data.copy_(y),
    "through .data, quantized": lambda w, y: w.data.copy_(w.detach().clone()),
    "through a view": lambda w, y: w.view(2, 16, 32).copy_(y.view(2, 16, 32)),
    "through an older view": lambda w, y: w.older.copy_(y.view(2, 16, 32)),
    "an optimizer": lambda w, y: sgd(w, False),
    "a foreach optimizer": lambda w, y: sgd(w, True),
    "its own load": lambda w, y: torch.nn.Module.load_state_dict(holder(w), {"w": y}),
}


def holder(w):
    module = torch.nn.Module()
    module.register_parameter("w", w)
    return module


def made(name, recipe, device):
    with te.quantized_model_init(recipe=recipe):
        return MODULES[name](device)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_weight_changed_before_backward_is_an_error(device, name, recipe):
    chosen = RECIPES[recipe]()
    module = made(name, chosen, device)
    x = randn(16, 2, 32, device=device, requires_grad=True)
    weights = {n: p for n, p in module.named_parameters() if isinstance(p, te.QuantizedTensor)}
    assert weights
    for key, weight in weights.items():
        with te.autocast(recipe=chosen):
            y = module(x)
        with torch.no_grad():
            weight.zero_()
        with pytest.raises(RuntimeError, match=CHANGED):
            y.sum().backward()
        with te.autocast(recipe=chosen):
            y = module(x)
        y.sum().backward()  # nothing changed in between
        assert x.grad is not None, key


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_change_a_weight_is_noticed(device, change, recipe):
    chosen = RECIPES[recipe]()
    module = made("Linear", chosen, device)
    x = randn(16, 32, device=device, requires_grad=True)
    module.weight.older = module.weight.detach().view(2, 16, 32)
    with te.autocast(recipe=chosen):
        y = module(x)
    values = randn(32, 32, device=device)
    with torch.no_grad():
        CHANGES[change](module.weight, values)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("change", ["quantize_", "update_quantized", "with a flag", "zero_", "copy_ of quantized"])
def test_operations_that_saved_a_quantized_tensor_notice_it(device, change, name):
    """Plain operations keep the tensor itself, a function of the caller's its parts."""
    p, x = (
        torch.nn.Parameter(FORMATS[name](device=device)(randn(6, 40, device=device))),
        randn(3, 40, device=device, requires_grad=True),
    )
    saved_by = {
        "linear": lambda: torch.nn.functional.linear(x, p),
        "matmul": lambda: x @ p.view(2, 3, 40).view(6, 40).t(),
        "own function": lambda: Saved.apply(x, p),
    }
    for how, call in saved_by.items():
        y = call()
        with torch.no_grad():
            CHANGES[change](p, randn(6, 40, device=device))
        with pytest.raises(RuntimeError, match=CHANGED):
            y.sum().backward()
        call().sum().backward()
        assert x.grad is not None, how


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        tensors, ctx.tensor_objects = te.prepare_for_saving(weight)
        ctx.save_for_backward(*tensors)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx, dy):
        return dy @ te.restore_from_func_ctx(ctx)[0].dequantize(), None


@pytest.mark.parametrize("name", FORMATS)
def test_versions_move_with_each_write_and_with_nothing_else(device, name):
    quantizer = FORMATS[name](device=device)
    t, y = quantizer(randn(6, 40, device=device)).clone(), randn(6, 40, device=device)
    parts = parts_of(t)

    def versions():
        return [t._version, *(p._version for p in parts.values())]

    for write in (
        lambda: quantizer.update_quantized(y, t),
        lambda: quantizer.quantize(y, out=t),
        lambda: t.quantize_(y),
        lambda: t.copy_(t.clone()),
        lambda: t.mul_(0.5),
        lambda: t.view(2, 3, 40).copy_(y.view(2, 3, 40)),
    ):
        before = versions()
        write()
        assert all(new > old for new, old in zip(versions(), before, strict=True))
    before = versions()
    t.dequantize(), t + 1.0, t.get_data_tensors(), copy.deepcopy(t), t.detach(), quantizer(y)
    assert versions() == before
    with torch.inference_mode():
        inside = quantizer(y)
        inside.quantize_(y)
    assert_same_bits(inside.dequantize(), t.quantize_(y).dequantize())
    bare = FORMATS[name](device=device)
    bare.internal = True
    storage = bare(y)
    if name in FP8_FORMATS:
        before = [p._version for p in parts_of(storage).values()]
        storage.quantize_(y)
        assert all(p._version > old for p, old in zip(parts_of(storage).values(), before, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_directions_that_come_and_go_before_backward_change_nothing(device, recipe):
    chosen = RECIPES[recipe]()
    module = made("Linear", chosen, device).eval()  # scales rest
    x = randn(16, 32, device=device, requires_grad=True)
    grads = []
    for change in (lambda w: None, lambda w: w.update_usage(columnwise_usage=False), lambda w: recreated(w)):
        with te.autocast(recipe=chosen):
            y = module(x)
        change(module.weight)
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert_same_bits(grads[1], grads[0])
    assert_same_bits(grads[2], grads[0])


def recreated(weight):
    weight.update_usage(columnwise_usage=False)
    weight.update_usage(columnwise_usage=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_a_kept_weight_made_again_leaves_a_microbatch_in_flight_its_own(device, name, recipe):
    """is_first_microbatch=True twice before the backward of the first: its gradient is as if it had run alone."""
    chosen = RECIPES[recipe]()
    module = MODULES[name](device)
    inputs = [randn(16, 32, device=device, scale=s, requires_grad=True) for s in (1.0, 8.0)]
    with te.autocast(recipe=chosen):  # scales
        module(inputs[0]).sum().backward()
    alone = copy.deepcopy(module)
    with te.autocast(recipe=chosen):
        wanted = alone(inputs[0], is_first_microbatch=True)
    want = torch.autograd.grad(wanted.square().sum(), inputs[0])[0]
    outputs = []
    for x in inputs:
        with te.autocast(recipe=chosen):
            outputs.append(module(x, is_first_microbatch=True))
        for weight in module.parameters():
            if weight.dim() == 2:
                weight.data.mul_(-2)  # another copy; .data, since autograd refuses a backward after a write
    assert_same_bits(torch.autograd.grad(outputs[0].square().sum(), inputs[0])[0], want)
    outputs[1].sum().backward()


def test_unpacked_tensors_are_written(device):
    source = [randn(7, device=device), randn(3, 5, device=device)]
    packed = functional.offload_pack(source)
    targets = [torch.empty_like(t) for t in source]
    versions, before = [t._version for t in targets], packed._version
    functional.offload_unpack(packed, targets)
    assert all(t._version > v for t, v in zip(targets, versions, strict=True))
    functional.offload_pack(source, packed)
    assert packed._version > before
