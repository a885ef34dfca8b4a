# Groups of a stash beside checkpoints, offload, delayed weight gradients, FP8, frozen layers and eval: the bits of a
# run that keeps everything.
import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from .cases import Layers, Originals, count, dead_rows_zero, made, report, same, step
from .layers import HIDDEN, ROWS, Declared, agree, inputs_of, ours, stack

pytestmark = pytest.mark.usefixtures("fp8_left_off")


@pytest.mark.parametrize("how", ["te", "te reentrant", "torch", "around"])
def test_beside_checkpoints(how, device):
    """Inside of a group it saves its input alone; a group inside of a checkpoint takes nothing."""
    layers = ours("gelu", device)

    def run(layer, x, counter):
        if how == "te":
            return te.checkpoint(layer, Declared.declared(x * 1, counter), use_reentrant=False)
        if how == "te reentrant":
            return te.checkpoint(layer, Declared.declared(x * 1, counter), use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(layer, Declared.declared(x * 1, counter), use_reentrant=False)

    counters = [count(17, device)]
    with made(device) as stash:
        if how != "around":
            module = Layers(*layers, prepare=run)
            given = inputs_of(device, [17])
            expected, _ = step(module, given, counters)
            for _ in range(2):
                found, overwritten = step(module, given, counters, stash)
                same(found, expected)
                assert overwritten or how == "torch"  # it saves its inputs outside of hooks
                stash.reset()
            return
        module, (x,) = Layers(*layers), inputs_of(device, [17])
        expected, _ = step(module, [x], counters)
        x = x.requires_grad_()
        y = te.checkpoint(lambda x: module(x, counters[0], stash), x, use_reentrant=False)
        y[:17].sum().backward()
        same([y[:17], x.grad[:17], *(p.grad for p in module.parameters())], expected)
        assert not stash.step.names


@pytest.mark.parametrize("order", ["inside", "around"])
def test_beside_offload(order, device, monkeypatch):
    from transformer_engine.pytorch.cpu_offload import layer as offload_layer

    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 64)
    layers, (x,), counter = ours("gelu", device), inputs_of(device, [17]), count(17, device)

    def run(context=None, sync=None, stash=None):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        y = given = x.clone().requires_grad_()
        with Originals() as originals:
            for i, layer in enumerate(layers):
                if context is None:
                    y = layer(y)
                    continue
                group = stash.group(i, counter)
                with context if order == "inside" else group, group if order == "inside" else context:
                    y = layer(y)
                y = sync(y)
            if stash is not None:
                stash.step.free_leaving()
                originals.overwrite(given)
        y.backward(torch.ones_like(y) * (torch.arange(ROWS, device=device)[:, None] < 17))
        return [y.detach()[:17], given.grad[:17], *(p.grad for layer in layers for p in layer.parameters())], originals

    expected, _ = run()
    context, sync = te.get_cpu_offload_context(True, 2, 3)
    with made(device) as stash:
        for _ in range(2):
            found, originals = run(context, sync, stash)
            same(found, expected)
            assert originals.overwritten > 0
            stash.reset()


def test_delayed_weight_gradients(device):
    layers = [te.LayerNormMLP(HIDDEN, 48, device=device, delay_wgrad_compute=True) for _ in range(3)]
    plain = [te.LayerNormMLP(HIDDEN, 48, device=device) for _ in range(3)]
    for a, b in zip(layers, plain, strict=True):
        b.load_state_dict(a.state_dict())
    given, counters = inputs_of(device, [17]), [count(17, device)]
    expected, _ = step(Layers(*plain), given, counters)
    with made(device) as stash:
        for _ in range(2):
            module = Layers(*layers)
            found, overwritten = step(module, given, counters, stash)
            for layer in reversed(layers):
                layer.backward_dw()
            same(found[:2] + [p.grad for p in module.parameters()], expected)
            assert overwritten
            stash.reset()


RECIPES = [recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8BlockScaling]


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8(recipe, device):
    """A tensor with its rows along another dimension stays."""
    torch.manual_seed(3)
    layers = [te.LayerNormMLP(128, 256, activation="swiglu", device=device) for _ in range(2)]
    x = dead_rows_zero(randn(128, 128, device=device), 48)

    def run(layer, x, counter):
        with te.autocast(enabled=True, recipe=recipe()):
            return layer(x)

    import copy

    first, second = (Layers(*copy.deepcopy(layers), prepare=run) for _ in range(2))
    with made(device) as stash:
        for _ in range(3):
            expected, _ = step(first, [x], [count(48, device)])
            found, overwritten = step(second, [x], [count(48, device)], stash)
            same(found, expected)
            assert overwritten and report(stash)["flags"] == 0
            stash.reset()


def test_frozen_layers_and_eval(device):
    module, given, counters = stack("gelu", device), inputs_of(device, [17]), [count(17, device)]
    for p in module.layers[1].parameters():
        p.requires_grad_(False)
    with made(device) as stash:
        agree(stash, module, given, counters, steps=3)
        for p in module.layers[0].parameters():
            p.requires_grad_(False)
        expected, _ = step(module, given, counters)
        same(step(module, given, counters, stash)[0], expected)
        stash.reset()
        with torch.no_grad():
            y = module(given[0], counters[0], stash)
        assert not stash.step.any_group and not y.requires_grad
        module.eval()
        agree(stash, module, given, counters, steps=2)
