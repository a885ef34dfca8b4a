"""FusedAdam on weights that are held quantized, of every format, on modules and on models that begin on meta.

A weight is its master, rounded to the weight's dtype and quantized as anything else written into it is: by the weight's
own scale under delayed scaling, in the pass of the step."""

import copy

import pytest
import torch
from quantized_cases import E5M2, FORMATS, assert_same_parts, assert_same_tensor, delayed, parts_of
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam

from .cases import assert_same, everything, more_steps, parameters

pytestmark = pytest.mark.usefixtures("fp8_left_off")

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "master_weights": True}
SHAPE = (40, 48)


def weight_of(quantizer, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Parameter(quantizer(randn(*SHAPE, dtype=dtype, device=device)))


@pytest.mark.parametrize("master", (torch.float32, torch.float16))
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_its_master_quantized(device, name, master):
    weight, twin = (weight_of(FORMATS[name](device=device), device) for _ in range(2))
    plain = torch.nn.Parameter(weight.dequantize(dtype=torch.float32).detach())  # bfloat16 of its own
    ours = FusedAdam([weight], **OPTIONS, master_weight_dtype=master)
    theirs = FusedAdam([plain], **OPTIONS, master_weight_dtype=master)
    for step in range(3):
        more_steps(ours, 1, step)
        plain.grad = weight.grad.float()
        theirs.step()
        assert_same_bits(ours.state[weight]["master_param"], theirs.state[plain]["master_param"])
        with torch.no_grad():
            twin.quantize_(plain.detach().bfloat16())
        assert_same_tensor(weight.detach(), twin.detach())
        assert parts_of(weight).keys() == parts_of(twin).keys()


@pytest.mark.parametrize("rows", (SHAPE[0], None))
@pytest.mark.parametrize("fp8_dtype", (te.DType.kFloat8E4M3, E5M2))
def test_delayed_weights_are_written_in_the_pass(device, fp8_dtype, rows):
    """Bytes, amax, scale_inv and the transpose, in the memory that they had; nothing else touches the values."""
    weight = weight_of(delayed(fp8_dtype, device, columnwise=rows is not None), device)
    quantizer, places = weight._quantizer, {name: t.data_ptr() for name, t in parts_of(weight).items()}
    quantizer.update_quantized = None  # not called
    quantizer.scale.fill_(2.5)
    quantizer.amax.zero_()
    optimizer = FusedAdam([weight], **OPTIONS)
    more_steps(optimizer, 2)
    master = optimizer.state[weight]["master_param"].bfloat16().float()
    fp8 = torch.float8_e5m2 if fp8_dtype is E5M2 else torch.float8_e4m3fn
    largest = torch.finfo(fp8).max
    wanted = (master * 2.5).clamp(-largest, largest).to(fp8).view(torch.uint8)
    assert_same_bits(weight._data, wanted)
    if rows is not None:
        assert_same_bits(weight._transpose, wanted.t().contiguous())
    assert weight._scale_inv.item() == float(torch.tensor(1.0) / 2.5) and quantizer.amax >= master.abs().max()
    assert {name: t.data_ptr() for name, t in parts_of(weight).items()} == places
    assert weight.get_usages() == {"rowwise": True, "columnwise": rows is not None}


def test_a_backward_detects_the_step(device):
    weight = weight_of(delayed(device=device), device, torch.float32)
    optimizer = FusedAdam([weight], **OPTIONS)
    x = randn(3, SHAPE[1], device=device, requires_grad=True)
    data = weight._data
    y = (x * data[:3].float()).sum()
    saved = y.grad_fn._saved_self._version if hasattr(y.grad_fn, "_saved_self") else data._version
    more_steps(optimizer, 1)
    assert data._version > saved and weight._version > 0


def model_of(device, recipe, primary):
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=primary, recipe=recipe, preserve_high_precision_init_val=True):
        return torch.nn.Sequential(
            te.LayerNormLinear(32, 48, params_dtype=torch.bfloat16, device=device),
            te.Linear(48, 32, params_dtype=torch.bfloat16, device=device),
        )


def train(model, recipe, device, steps=5, **options):
    optimizer = FusedAdam(model.parameters(), **OPTIONS | options)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            y = model(randn(16, 32, dtype=torch.bfloat16, device=device))
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), optimizer


@pytest.mark.parametrize("recipe", (Float8CurrentScaling, Float8BlockScaling))
def test_trains_to_the_bits_of_weights_quantized_at_each_forward(device, recipe):
    primary, plain = model_of(device, recipe(), True), model_of(device, recipe(), False)
    assert isinstance(primary[0].weight, te.QuantizedTensor) and not isinstance(plain[0].weight, te.QuantizedTensor)
    (losses, ours), (wanted, theirs) = train(primary, recipe(), device), train(plain, recipe(), device)
    assert_same_bits(losses, wanted)
    for (name, p), (_, q) in zip(primary.named_parameters(), plain.named_parameters(), strict=True):
        assert_same_bits(ours.state[p]["master_param"], theirs.state[q]["master_param"], name)
        if isinstance(p, te.QuantizedTensor):
            twin = p.detach().clone()
            twin.quantize_(q.detach())
            assert_same_tensor(p.detach(), twin)
        else:
            assert_same_bits(p, q)


def test_trains_by_the_rule_of_delayed_scaling(device):
    """Equals a model whose weights are stepped as masters and written back: losses, bytes, scales and histories."""

    def recipe():
        return DelayedScaling(amax_history_len=3)

    ours, theirs = model_of(device, recipe(), True), model_of(device, recipe(), True)
    losses, optimizer = train(ours, recipe(), device)
    begin = [getattr(p, "get_high_precision_init_val", p.detach)() for p in theirs.parameters()]
    masters = [torch.nn.Parameter(values.to(device).float()) for values in begin]
    of_masters, wanted = FusedAdam(masters, lr=0.05, weight_decay=0.1), []
    for step in range(5):
        torch.manual_seed(100 + step)
        with te.autocast(recipe=recipe()):
            y = theirs(randn(16, 32, dtype=torch.bfloat16, device=device))
        loss = y.float().square().mean()
        theirs.zero_grad()
        loss.backward()
        for p, m in zip(theirs.parameters(), masters, strict=True):
            m.grad = p.grad.float()
        of_masters.step()
        with torch.no_grad():
            for p, m in zip(theirs.parameters(), masters, strict=True):
                p.copy_(m.bfloat16())
        wanted.append(loss.detach())
    assert_same_bits(losses, torch.stack(wanted))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("scale", "amax_history"):
            for way in ("scaling_fwd", "scaling_bwd"):
                assert_same_bits(getattr(a.fp8_meta[way], name), getattr(b.fp8_meta[way], name), f"{way} {name}")
        assert_same_tensor(a.weight.detach(), b.weight.detach())
    assert optimizer.state[ours[0].weight]["master_param"].dtype is torch.float32


def test_before_the_first_forward_a_delayed_weight_brings_its_scale(device):
    model = model_of(device, DelayedScaling(), True)
    weight = model[1].weight
    weight.grad = torch.full_like(weight.dequantize(), 100.0)
    optimizer = FusedAdam([weight], lr=30.0, master_weights=True)
    optimizer.step()
    master = optimizer.state[weight]["master_param"]
    assert (weight.dequantize().float() - master).abs().max() <= 2.0**-3 * master.abs().max()


def test_masters_of_weights_that_were_loaded_are_those_values(device):
    model, other = (model_of(device, Float8CurrentScaling(), True) for _ in range(2))
    with torch.no_grad():
        other[0].weight.copy_(torch.randn(48, 32) * 3)
    model.load_state_dict(other.state_dict())
    optimizer = FusedAdam(model.parameters(), lr=0.0, master_weights=True)
    optimizer.initialize_state(model[0].weight)
    optimizer.initialize_state(model[1].weight)
    assert_same_bits(optimizer.state[model[0].weight]["master_param"], other[0].weight.dequantize(dtype=torch.float32))
    kept = model[1].weight.get_high_precision_init_val().to(device)
    assert_same_bits(optimizer.state[model[1].weight]["master_param"], kept.float())


def test_quantized_weights_resume(device):
    recipe = Float8CurrentScaling()
    first = model_of(device, recipe, True)
    _, optimizer = train(first, recipe, device, 2)
    second = copy.deepcopy(first)
    again = FusedAdam(second.parameters(), **OPTIONS)
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, again):
        more_steps(each, 2, 2)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        if isinstance(p, te.QuantizedTensor):
            assert_same_parts(parts_of(q), p.detach(), "weight")
        else:
            assert_same_bits(q, p)


def test_models_that_begin_on_meta(device):
    def trained_model(begin):
        torch.manual_seed(5)
        model = te.TransformerLayer(32, 64, 4, device=begin, hidden_dropout=0.0, attention_dropout=0.0)
        if begin == "meta":
            model = model.to_empty(device=device)
            for part in model.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(randn(6, 2, 32, device=device)).square().mean().backward()
            optimizer.step()
        return everything(optimizer)

    assert_same(trained_model("meta"), trained_model(device))


def test_weights_with_a_pitch(device):
    """FP8 rows are aligned to 16 bytes: 5 x 3 has gaps, which stay zero."""
    quantizer = delayed(device=device, scale=1.0)
    weight = torch.nn.Parameter(quantizer(torch.ones(5, 3, device=device)))
    whole = weight._data.as_strided((5, weight._data.stride(0)), (weight._data.stride(0), 1))
    optimizer = FusedAdam([weight], lr=0.5, betas=(0.0, 0.0), master_weights=True)
    weight.grad = torch.ones(5, 3, device=device)
    optimizer.step()
    assert (weight.dequantize() == 0.5).all() and not whole[:, 3:].any()


def test_gradients_in_float32_of_bfloat16_weights(device):
    weight = weight_of(FORMATS["current"](device=device), device)
    weight.decoupled_grad = randn(*SHAPE, device=device)
    optimizer = FusedAdam([weight], betas=(0.5, 0.9), use_decoupled_grad=True, master_weights=True)
    optimizer.step()
    assert_same_bits(optimizer.state[weight]["exp_avg"], 0.5 * weight.decoupled_grad)
    assert not any(p.grad is not None for p in parameters(device))


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_a_weight_loaded_near_its_init_values_is_not_put_back(device, recipe):
    """A checkpoint of an early step differs from the kept values by less than the format's rounding: another weight."""
    with te.quantized_model_init(True, recipe(), preserve_high_precision_init_val=True):
        modules = [te.Linear(128, 128, device=device, bias=False) for _ in range(2)]
    for module, factor in zip(modules, (0.97, None)):
        init = module.weight.get_high_precision_init_val().float().to(device)
        if factor is not None:
            with torch.no_grad():
                module.weight.copy_(init * factor)
        held = module.weight.dequantize(dtype=torch.float32)
        optimizer = FusedAdam(module.parameters(), lr=0.0, master_weights=True)
        module.weight.grad = torch.zeros(128, 128, device=device)
        optimizer.step()
        master = optimizer.get_unscaled_state(module.weight, "master_param")
        assert_same_bits(master, init if factor is None else held)


def test_init_values_are_known_again_by_a_scale_that_is_not_to_the_bit(device):
    """1 / (1 / scale) is another number than most scales, and rounds some of many values to the other side."""
    torch.manual_seed(0)
    with te.quantized_model_init(True, DelayedScaling(), preserve_high_precision_init_val=True):
        module = te.Linear(2048, 2048, device=device, bias=False)
    optimizer = FusedAdam(module.parameters(), master_weights=True)
    optimizer.initialize_state(module.weight)
    kept = module.weight.get_high_precision_init_val().float().to(device)
    assert_same_bits(optimizer.get_unscaled_state(module.weight, "master_param"), kept)
