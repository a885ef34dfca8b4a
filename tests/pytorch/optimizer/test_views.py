"""Views of quantized weights as parameters: those that are copies of values are refused by whatever writes memory, and
those that are the weight's own bytes are stepped, with every other row of it as it was."""

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD, adam_rows
from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, replace_raw_data

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}


def delayed(device, shape=(48, 32), scale=4.0, columnwise=True):
    """A weight of a scale that is given, and its quantizer."""
    one = torch.tensor([scale], device=device)
    quantizer = te.Float8Quantizer(one, torch.zeros(1, device=device), te.DType.kFloat8E4M3, columnwise=columnwise)
    return quantizer(randn(*shape, device=device)), quantizer


def copies(device):
    """name -> (a view that is a copy of values, the weight)."""
    found = {}
    for name, recipe in RECIPES.items():
        with te.quantized_model_init(recipe=recipe()):
            weight = te.Linear(256, 256, device=device).weight
        found[f"{name} transposed"] = weight.detach().t(), weight
        found[f"{name} columns"] = weight.detach()[:, 16:32], weight
        if name == "block":
            found["block flat"] = weight.detach().view(-1)[100:4000], weight
    return found


COPIES = [*(f"{name} {kind}" for name in RECIPES for kind in ("transposed", "columns")), "block flat"]
OPTIMIZERS = {
    "FusedAdam": lambda p: FusedAdam([p]),
    "FusedAdam, masters": lambda p: FusedAdam([p], master_weights=True),
    "FusedAdam, FP8": lambda p: FusedAdam([p], master_weights=True, exp_avg_dtype=torch.uint8),
    "FusedSGD": lambda p: FusedSGD([p], lr=0.1),
    "FusedSGD, momentum": lambda p: FusedSGD([p], lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW([p]),
    "SGD": lambda p: torch.optim.SGD([p], lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_values_is_refused(device, copy, name):
    view, weight = copies(device)[copy]
    assert not isinstance(view, te.QuantizedTensor)
    before = weight.dequantize()
    view.grad = torch.ones_like(view.float())
    optimizer = OPTIMIZERS[name](view)
    with pytest.raises((ValueError, RuntimeError), match=r"would be lost.*t\[first:last\]|strides .* without gaps"):
        optimizer.step()
    assert not any(t.any() for s in optimizer.state.values() for t in s.values() if t.dim())
    assert_same_bits(weight.dequantize(), before)


def calls(view):
    plain = [torch.ones_like(view.float()) for _ in range(4)]
    g, m, v, w = ([t] for t in plain)
    flag, one = torch.zeros(1, dtype=torch.int32, device=view.device), torch.ones(1, device=view.device)
    step = torch.ones(1, dtype=torch.int32, device=view.device)
    numbers = 1e-3, 0.9, 0.999, 1e-8
    o = te.optimizers
    return {
        "adam": lambda p: o.multi_tensor_adam(64, flag, [g, p, m, v], *numbers, 1, 1, 1, 0.0),
        "adam, a moment": lambda p: o.multi_tensor_adam(64, flag, [g, w, p, v], *numbers, 1, 1, 1, 0.0),
        "adam, a master": lambda p: o.multi_tensor_adam(64, flag, [g, w, m, v, p], *numbers, 1, 1, 1, 0.0),
        "capturable": lambda p: o.multi_tensor_adam_capturable(
            64, flag, [g, p, m, v], one, *numbers[1:], step, 1, 1, 0.0, one
        ),
        "sgd": lambda p: o.multi_tensor_sgd(64, flag, [g, p, m], 0.0, 0.9, 0.0, 0.1, False, True, False, 1.0),
        "sgd, a copy": lambda p: o.multi_tensor_sgd(
            64, flag, [g, w, m, p], 0.0, 0.9, 0.0, 0.1, False, True, False, 1.0
        ),
        "scale": lambda p: o.multi_tensor_scale(64, flag, [g, p], 2.0),
        "scale_tensor": lambda p: o.multi_tensor_scale_tensor(64, flag, [g, p], one),
    }


@pytest.mark.parametrize("name", calls(torch.ones(2)))
def test_multi_tensor_functions_refuse_it(device, name):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        weight = te.Linear(32, 32, device=device).weight
    view = weight.detach().t()
    with refused(ValueError, "copy of its values", "Float8Tensor", "would be lost"):
        calls(view)[name]([view])
    te.optimizers.multi_tensor_l2norm(64, torch.zeros(1, dtype=torch.int32, device=device), [[view]])


def grad_of(weight, step):
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).to(weight.device)


def stepped(weight, cuts, steps=3, **options):
    """Steps flat parts of a weight, as a framework does that spreads its elements."""
    flat = weight.detach().view(-1)
    parts = [flat[a:b] for a, b in cuts]
    assert all(isinstance(p, te.QuantizedTensor) for p in parts)
    optimizer = FusedAdam(parts, lr=0.1, master_weights=True, **options)
    for step in range(steps):
        grad = grad_of(weight, step).view(-1)
        for part, (a, b) in zip(parts, cuts):
            part.grad = grad[a:b].clone()
        optimizer.step()
    return optimizer, parts


@pytest.mark.parametrize("columnwise", [False, True])
def test_flat_parts_of_a_delayed_weight_are_the_weight(device, columnwise):
    """All of them are the bits of a step of the whole, in both directions, with its amax."""
    found = []
    for cut in (True, False):
        torch.manual_seed(0)
        weight, quantizer = delayed(device, columnwise=columnwise)
        quantizer.scale.fill_(8.0)
        if cut:
            stepped(weight, [(0, 100), (100, 777), (777, 48 * 32)])
        else:
            optimizer = FusedAdam([p := weight.detach()], lr=0.1, master_weights=True)
            for step in range(3):
                p.grad = grad_of(p, step)
                optimizer.step()
        found.append((weight._data, weight._scale_inv, quantizer.amax, weight.dequantize()))
        if columnwise:
            assert_same_bits(weight._transpose, weight._data.t().contiguous())
    for got, want in zip(*found):
        assert_same_bits(got, want)
    assert found[0][1].item() == 1 / 8


def test_a_new_scale_that_other_ranks_lack_is_a_warning(device, monkeypatch):
    """Once in a process."""
    adam_rows._warn_of_other_ranks.cache_clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match="keeps the former scale") as found:
        stepped(delayed(device)[0], [(0, 100)])
    assert len(found) == 1


@pytest.mark.parametrize("skipped", [False, True])
def test_weights_of_other_ranks_get_the_scale_after_the_gather(device, skipped, monkeypatch):
    """Of three weights in one buffer this rank steps rows of the first, another one those of the second and third,
    which have the recipe's scales there. A weight elsewhere keeps its scale, as all do in a gather without a step."""
    (first, q0), (second, q1), (third, q2), (elsewhere, q3) = (delayed(device) for _ in range(4))
    buffer = torch.zeros(3, 48, 32, dtype=torch.uint8, device=device)
    for weight, data in zip((first, second, third), buffer):
        replace_raw_data(weight, data)
    weights = [first, second, third, elsewhere]
    monkeypatch.setattr("transformer_engine.pytorch.optimizers.adam_groups._is_capturable_on", lambda device: True)
    part = first.detach().view(-1)[:100]
    optimizer = FusedAdam([part], lr=0.1, master_weights=True, capturable=True)
    optimizer.found_inf = torch.full((1,), float(skipped), device=device)
    part.grad = torch.ones(100, device=device)
    for quantizer, scale in zip((q0, q1, q2, q3), (8.0, 16.0, 32.0, 64.0)):
        quantizer.scale.fill_(scale)
    optimizer.step()
    post_all_gather_processing(weights)
    wanted = [0.25] * 4 if skipped else [1 / 8, 1 / 16, 1 / 32, 0.25]
    assert [w._scale_inv.item() for w in weights] == wanted
    for quantizer in (q0, q1, q2, q3):
        quantizer.scale.fill_(2.0)
    post_all_gather_processing(weights)
    assert [w._scale_inv.item() for w in weights] == wanted


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_other_rows_keep_their_values_under_a_new_scale(device, columnwise, skipped, monkeypatch):
    """A part alone: the scale of the recipe comes in with the step, and the rest is rounded by it. A skipped step
    leaves bytes and scale."""
    torch.manual_seed(0)
    weight, quantizer = delayed(device, columnwise=columnwise)
    weight.view(-1)[:4].copy_(torch.full((4,), 20.0, device=device))  # the largest is one of the others
    values, data = weight.dequantize(), weight._data.clone()
    part = weight.detach().view(-1)[64:512]
    monkeypatch.setattr("transformer_engine.pytorch.optimizers.adam_groups._is_capturable_on", lambda device: True)
    optimizer = FusedAdam([part], lr=0.1, master_weights=True, capturable=True)
    optimizer.found_inf = torch.full((1,), float(skipped), device=device)
    quantizer.scale.fill_(16.0)
    quantizer.amax.zero_()
    part.grad = torch.ones(448, device=device)
    optimizer.step()
    now = weight.dequantize()
    if skipped:
        assert_same_bits(now, values)
        assert torch.equal(weight._data, data) and weight._scale_inv.item() == 0.25 and quantizer.amax.item() == 0
        return
    assert weight._scale_inv.item() == 1 / 16
    rest = torch.ones(48 * 32, dtype=torch.bool, device=device)
    rest[64:512] = False
    want = te.Float8Quantizer(torch.tensor([16.0], device=device), torch.zeros(1, device=device), quantizer.dtype)
    assert_same_bits(now.view(-1)[rest], want(values).dequantize().view(-1)[rest])
    moved = now.view(-1)[64:512] - values.view(-1)[64:512]
    assert (moved + 0.1).abs().max() < 0.3
    assert quantizer.amax.item() >= values.view(-1)[rest].abs().max().item()
    if columnwise:
        assert_same_bits(weight._transpose, weight._data.t().contiguous())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_parts_of_a_models_weight_move_as_the_whole_does(device, recipe):
    """Forwards between the steps. By one scale that is given: to the bit."""
    rule, weights = RECIPES[recipe](), []
    for cut in (True, False):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=rule):
            layer = te.Linear(64, 64, bias=False, device=device)
        weight = layer.weight.detach()
        parts = [weight.view(-1)[:1000], weight.view(-1)[1000:]] if cut else [weight]
        optimizer = FusedAdam(parts, lr=0.01, master_weights=True)
        for step in range(4):
            with te.autocast(recipe=rule):
                layer(torch.randn(32, 64, device=device)).backward(grad_of(weight, step)[:32])
            grad, before = layer.weight.grad, weight.dequantize()
            for part, g in zip(parts, grad.reshape(-1).split([1000, 3096]) if cut else [grad]):
                part.grad = g
            optimizer.step()
            assert (layer.weight.dequantize() != before).float().mean() > 0.2
            layer.zero_grad()
        weights.append(layer.weight.dequantize().detach())
        masters = torch.cat([optimizer.state[p]["master_param"].view(-1) for p in parts]).view(64, 64)
    if recipe == "delayed":
        assert_same_bits(*weights)
    assert (weights[0] - masters).abs().max() <= masters.abs().max() * (2**-3 if recipe == "delayed" else 2**-4)
