# Modules under autocast: products against fake-quantized plain PyTorch, the scales of delayed scaling against scales
# kept in Python, what a step leaves and what it leaves alone.
import pytest
import torch
from families import FAMILIES, build, inputs_of
from fp8_steps import RECIPES, all_scales, assert_same_tensors, meta, pair, step
from plain_fp8 import PlainScales, linear
from plain_modules import as_tuple
from support import U32, assert_same_bits, assert_within, fp8_sum_error, randn, rounding

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Format

pytestmark = pytest.mark.usefixtures("fp8_left_off")

LINEAR = [name for name in FAMILIES if name not in ("LayerNorm", "RMSNorm")]


# ---- against plain PyTorch ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "k", "n"), [(32, 64, 48), (5, 17, 3), (130, 300, 140), (1, 128, 16)])
def test_linear_is_the_fake_quantized_one(device, recipe, rows, k, n):
    module = te.Linear(k, n, device=device)
    x, dy = randn(rows, k, device=device, requires_grad=True), randn(rows, n, device=device)
    with te.autocast(recipe=RECIPES[recipe]()):
        y = module(x)
    y.backward(dy)
    scales = {"x": PlainScales(4), "weight": PlainScales(4), "dy": PlainScales(4, True)}
    want = linear(recipe, x.detach().cpu(), module.weight.detach().cpu(), module.bias.detach().cpu(), dy.cpu(), scales)
    got = {"y": y, "dx": x.grad, "dweight": module.weight.grad, "dbias": module.bias.grad}
    terms = {"y": k + 1, "dx": n, "dweight": rows, "dbias": rows}
    for name, (value, magnitude) in want.items():
        # products of FP8 values are exact in float32, sums of them are not, and the scales are multiplied in once
        where = "cpu" if name == "dbias" else device  # which no tensor core sums
        summed = fp8_sum_error(magnitude, terms[name], where, name == "y" and recipe != "block")
        bound = summed + 4 * U32 * magnitude + rounding(value, torch.float32)
        assert_within(got[name], value, bound, name)


@pytest.mark.parametrize("form", [Format.HYBRID, Format.E4M3])
def test_delayed_scales_follow_the_plain_ones(device, form):
    """Six steps of two layers. In each the tensors' amaxes are known exactly: weights change by hand."""
    hybrid = form is Format.HYBRID
    recipe = RECIPES["delayed"](fp8_format=form)
    module = te.Linear(16, 16, bias=False, device=device)
    plain = {name: PlainScales(4, hybrid and name == "dy") for name in ("x", "weight", "dy")}
    for turn in range(6):
        x, dy = randn(8, 16, device=device, scale=2.0**turn), randn(8, 16, device=device, scale=3.0**-turn)
        with torch.no_grad():
            module.weight.mul_(1.5)
        with te.autocast(recipe=recipe):
            y = module(x)
        weight = module.weight.detach().cpu()
        value, magnitude = linear("delayed", x.cpu(), weight, None, dy.cpu(), plain)["y"]
        bound = fp8_sum_error(magnitude, 16, device, True) + 4 * U32 * magnitude + rounding(value, torch.float32)
        assert_within(y, value, bound)
        for name, t in (("x", x), ("weight", module.weight), ("dy", dy)):
            plain[name].see(t)
        for name in ("x", "weight"):
            plain[name].update()
        forward, backward = meta(module).values()
        assert backward.amax_history[0, 0] == 0 and backward.scale[0].item() == plain["dy"].scale.item()
        y.backward(dy)
        plain["dy"].update()
        for state, column, name in ((forward, 0, "x"), (forward, 1, "weight"), (backward, 0, "dy")):
            assert state.scale[column].item() == plain[name].scale.item(), (turn, name)
            assert state.amax_history[:, column].tolist() == plain[name].history, (turn, name)
        assert forward.scale[2] == 1 and not forward.amax_history[:, 2].any() and backward.scale[1] == 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LINEAR)
def test_every_module_computes_about_the_same(device, name, recipe):
    """Off by FP8's roundoff and not by more: a gradient passes at most four products of operands that are off by 2^-4
    (E4M3) and 2^-3 (E5M2) at worst, in norm by about half of that. A scale that is off by two or more is beyond it."""
    module = build(name, device)
    inputs = [t.requires_grad_() for t in inputs_of(name, device, batch=16)]
    wanted = as_tuple(module(*inputs))[0]
    weights = torch.randn(wanted.shape).to(wanted)
    high = torch.autograd.grad((wanted * weights).sum(), [*inputs, *module.parameters()])
    for _ in range(3):  # delayed scaling has the amaxes after the first
        with te.autocast(recipe=RECIPES[recipe]()):
            got = as_tuple(module(*inputs))[0]
        low = torch.autograd.grad((got * weights).sum(), [*inputs, *module.parameters()])
    for a, b in zip((got, *low), (wanted, *high), strict=True):
        if b.norm() > 1e-3:  # a bias of keys has no gradient but rounding: attention does not see it
            assert 0 < (a - b).norm() < 0.35 * b.norm()
    linear_parts = [m for m in module.modules() if isinstance(m, te.Linear | te.LayerNormLinear | te.LayerNormMLP)]
    assert linear_parts and all(m.fp8 for m in linear_parts)
    module(*inputs)
    assert not any(m.fp8 for m in linear_parts)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_toy_is_learned(device, recipe):
    """200 steps of a regression: the FP8 run's loss over its last 20 steps is within 10 % of the plain one's, which is
    far below where it starts."""
    losses = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(te.LayerNormMLP(16, 64, device=device), te.Linear(16, 4, device=device))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        target = torch.randn(16, 4, device=device)
        seen = []
        for _ in range(200):
            x = torch.randn(64, 16, device=device)
            with te.autocast(enabled=enabled, recipe=RECIPES[recipe]()):
                loss = (model(x) - torch.tanh(x @ target)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses[enabled] = seen
    start, plain, ours = losses[False][0], sum(losses[False][-20:]) / 20, sum(losses[True][-20:]) / 20
    assert plain < 0.3 * start and abs(ours / plain - 1) < 0.1


# ---- what a step leaves ----


def test_without_gradients_or_training_nothing_is_noted(device):
    recipe = RECIPES["delayed"]()
    model, x = pair(device), randn(8, 16, device=device)
    step(model, x, recipe)
    before = all_scales(model)
    with torch.no_grad(), te.autocast(recipe=recipe):
        model(3 * x)
    model.eval()
    step(model, 3 * x, recipe)
    with torch.inference_mode(), te.autocast(recipe=recipe):
        model(3 * x)
    assert_same_tensors(all_scales(model), before)
    model.train()
    step(model, 3 * x, recipe)
    assert model[0].fp8_meta["scaling_fwd"].amax_history[-1, 0] == 3 * x.abs().max()


def test_inference_first_and_training_after(device):
    model, x = pair(device), randn(8, 16, device=device)
    recipe = RECIPES["delayed"]()
    with torch.inference_mode(), te.autocast(recipe=recipe):
        model(x)
    step(model, x, recipe)
    assert model[0].fp8_meta["scaling_fwd"].amax_history[-1, 0] == x.abs().max()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inference_first_and_recomputation_after(device, reentrant):
    model, x = te.Linear(16, 16, device=device), randn(8, 16, device=device, requires_grad=True)
    recipe = RECIPES["delayed"]()
    with torch.inference_mode(), te.autocast(recipe=recipe):
        model(x)
    with te.autocast(recipe=recipe):
        y = te.checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()
    assert model.fp8_meta["scaling_fwd"].amax_history[-1, 0] == x.abs().max()


def test_forwards_and_backwards_that_overlap(device):
    """As in a pipeline: each backward brings its own amaxes up to date, once."""
    recipe = RECIPES["delayed"]()
    model = pair(device)
    batches = [randn(8, 16, device=device, scale=2.0**i) for i in range(3)]
    gradients = [randn(8, 16, device=device, scale=5.0**i) for i in range(3)]
    outputs = []
    for x in batches:
        with te.autocast(recipe=recipe):
            outputs.append(model(x))
    backward = model[1].fp8_meta["scaling_bwd"]
    assert not backward.amax_history.any() and backward.scale.tolist() == [1.0, 1.0]
    for i, (y, dy) in enumerate(zip(outputs, gradients, strict=True)):
        y.backward(dy)
        seen = [g.abs().max() for g in gradients[: i + 1]]
        assert torch.equal(backward.amax_history[-1 - i :, 0], torch.stack(seen)) and backward.amax_history[0, 0] == 0
        assert backward.scale[0] == torch.full((), 57344.0, device=device) / max(seen)


def test_a_backward_twice_and_a_frozen_first_module(device):
    recipe = RECIPES["delayed"]()
    model, x = pair(device), randn(8, 16, device=device)
    model[0].requires_grad_(False)
    with te.autocast(recipe=recipe):
        y = model(x)
    dy = randn(8, 16, device=device)
    y.backward(dy, retain_graph=True)
    y.backward(2 * dy)
    first, second = (m.fp8_meta["scaling_bwd"] for m in model)
    assert second.amax_history[:, 0].tolist() == [0, 0, dy.abs().max().item(), 2 * dy.abs().max().item()]
    assert not first.amax_history.any()


def test_a_module_twice_in_a_region_notes_the_larger_amax(device):
    recipe = RECIPES["delayed"]()
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    with te.autocast(recipe=recipe):
        y = module(4 * x) + module(x)
    y.sum().backward()
    forward = module.fp8_meta["scaling_fwd"]
    assert forward.amax_history[:, 0].tolist() == [0, 0, 0, (4 * x).abs().max().item()]


def test_scales_change_when_the_outermost_region_ends_and_not_after_an_error(device):
    recipe = RECIPES["delayed"]()
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    with te.autocast(recipe=recipe):
        with te.autocast(recipe=recipe):
            module(x)
        assert meta(module)["fwd"].scale[0] == 1
    assert meta(module)["fwd"].scale[0] != 1
    before = meta(module)["fwd"].scale.clone()
    with pytest.raises(KeyError), te.autocast(recipe=recipe):
        module(100 * x)
        raise KeyError
    assert torch.equal(meta(module)["fwd"].scale, before)


def test_calibration_computes_in_high_precision_and_notes_amaxes(device):
    for make in (lambda: te.Linear(16, 16, device=device), lambda: te.LayerNormLinear(16, 16, device=device),
                 lambda: te.LayerNormMLP(16, 32, device=device, checkpoint=True)):  # fmt: skip
        module, x = make().eval(), randn(8, 16, device=device)
        with torch.no_grad():
            wanted = module(x)
            with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
                assert_same_bits(module(x), wanted)
            assert (module.fp8, module.fp8_calibration) == (False, True)
            state = module.fp8_meta["scaling_fwd"]
            for i, product in enumerate(module._products):
                weight = getattr(module, f"{product}_weight" if product else "weight")
                assert state.scale[3 * i + 1] == torch.tensor(448.0) / weight.abs().max().cpu()
                assert state.scale[3 * i] != 1
            with te.autocast(recipe=RECIPES["delayed"]()):
                calibrated = module(x)
        assert 0 < (calibrated - wanted).norm() < 0.1 * wanted.norm()
        if isinstance(module, te.Linear):
            assert state.scale[0] == torch.tensor(448.0) / x.abs().max().cpu()


def test_calibration_keeps_the_largest_amax_of_several_batches(device):
    module, recipe = te.Linear(16, 16, device=device), RECIPES["delayed"]()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        for amax in (1.0, 8.0, 2.0):
            module(torch.full((4, 16), amax, device=device))
    state = module.fp8_meta["scaling_fwd"]
    assert state.scale[0] == 448.0 / 8.0 and state.amax_history[-1, 0] == 8.0


@pytest.mark.parametrize("bias", [True, False])
def test_calibration_sees_what_the_second_product_reads(device, bias):
    module = te.LayerNormMLP(16, 32, bias=bias, normalization="RMSNorm", activation="relu", device=device).eval()
    if bias:
        torch.nn.init.constant_(module.fc1_bias, 50.0)
    x = randn(8, 16, device=device)
    with torch.no_grad():
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
            module(x)
        normed = torch.nn.functional.rms_norm(x, (16,), module.layer_norm_weight, module.eps)
        read = torch.nn.functional.linear(normed, module.fc1_weight, module.fc1_bias if bias else None).relu()
    seen = module.fp8_meta["scaling_fwd"].amax_history[-1, 3]
    assert (seen - read.max()).abs() <= 1e-5 * read.max()  # a sum of 16 products in another order


@pytest.mark.parametrize("first", ["unused", "detached", "frozen"])
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_backward_scales_follow_whichever_module_gets_a_gradient(device, first, use_reentrant):
    """Not the first one alone, and once a backward, when all of it has ended; in blocks that are recomputed too."""
    a, b, c = (te.Linear(16, 16, device=device) for _ in range(3))
    x = randn(8, 16, device=device, requires_grad=first != "frozen")

    def call(module, t):
        return module(t) if use_reentrant is None else te.checkpoint(module, t, use_reentrant=use_reentrant)

    if first == "frozen":
        a.requires_grad_(False)
    with te.autocast(recipe=RECIPES["delayed"](amax_history_len=8)):
        beside = call(a, x)
        middle = b(beside.detach() if first in ("detached", "frozen") else x)
        y = call(c, middle)
    dy = torch.ones_like(y)
    for count in (1, 2):
        y.backward(dy, retain_graph=True)
        for module in (b, c):
            state = meta(module)["bwd"]
            assert state.scale[0] == torch.tensor(57344.0) / state.amax_history[-1, 0].cpu(), count  # the newest amax
            assert (state.amax_history[:, 0] != 0).sum() == count
        assert meta(c)["bwd"].scale[0] == 57344
    assert meta(a)["bwd"].scale[0] == 1


def test_a_region_of_microbatches_changes_its_scales_once(device):
    """And a backward that fails leaves nothing due."""
    modules = [te.Linear(16, 16, device=device) for _ in range(3)]
    x = randn(8, 16, device=device)
    outs = []
    with te.autocast(recipe=RECIPES["delayed"](amax_history_len=8)):
        modules[0](x)
        for _ in range(3):
            middle = modules[1](x)
            outs.append((middle, modules[2](middle)))

    def failing(gradient):
        raise ArithmeticError

    state = meta(modules[2])["bwd"]
    handle = outs[0][0].register_hook(failing)
    with pytest.raises(ArithmeticError):
        outs[0][1].sum().backward(retain_graph=True)
    assert state.scale[0] == 1
    handle.remove()
    for _, y in outs:
        y.sum().backward()
        assert state.scale[0] == 57344
    assert (state.amax_history[:, 0] == 1).sum() == 2  # one update, and what the others left in the newest row
