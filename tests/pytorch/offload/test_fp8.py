# FP8 modules under offload: the bits of a run without, for each recipe, with recomputation, delayed weight gradients,
# kept weights and captured layers.
import functools

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from .cases import small  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")

HIDDEN, FFN, HEADS, LAYERS, K = 128, 256, 4, 4, 2
RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}
OVERRIDDEN = {
    f"{name}, {word}": functools.partial(RECIPES[name], backward_override=word)
    for name in ("current", "block")
    for word in ("high_precision", "dequantized")
}
RECIPES |= OVERRIDDEN


def family(name, device, **options):
    options |= {"device": device, "params_dtype": torch.bfloat16}
    if name == "Linear":
        return te.Linear(HIDDEN, HIDDEN, **options)
    if name == "LayerNormLinear":
        return te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options)
    if name == "TransformerLayer":
        return te.TransformerLayer(
            HIDDEN, FFN, HEADS, attention_dropout=0.0, hidden_dropout=0.0, fuse_qkv_params=True, **options
        )
    return te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options)


def build(name, device, **options):
    torch.manual_seed(0)
    return [family(name, device, **options) for _ in range(LAYERS)]


class Offloaded(torch.nn.Module):
    def __init__(self, layer, context, sync, recomputed=False):
        super().__init__()
        self.layer, self.context, self.sync, self.recomputed = layer, context, sync, recomputed

    def forward(self, x, **options):
        with self.context:
            x = te.checkpoint(self.layer, x, **options) if self.recomputed else self.layer(x, **options)
        return self.sync(x)


def train(layers, inputs, recipe, options=({},), after=lambda: None):
    """Steps of one microbatch each, with scales that go from step to step; outputs and gradients of all of them."""
    results = []
    for i, x in enumerate(inputs):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        with te.autocast(recipe=RECIPES[recipe]()):
            y = given
            for layer in layers:
                y = layer(y, **options[i % len(options)])
        y.backward(torch.ones_like(y))
        after()
        results += [y.detach().clone(), given.grad, *(p.grad.clone() for m in layers for p in m.parameters())]
    return results


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def inputs(device, count=3):
    torch.manual_seed(1)
    return [randn(32, 4, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(count)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_same_bits(name, recipe, device):
    expected = train(build(name, device), inputs(device), recipe)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    layers = [Offloaded(layer, context, sync) for layer in build(name, device)]
    same(train(layers, inputs(device), recipe), expected)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
    context.offload_synchronizer.forget_step()
    assert context.offload_synchronizer.pinned_usage()["slots"] == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed(recipe, device):
    class Recomputed(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return te.checkpoint(self.inner, x)

    expected = train([Recomputed(m) for m in build("LayerNormMLP", device)], inputs(device), recipe)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    layers = [Offloaded(layer, context, sync, recomputed=True) for layer in build("LayerNormMLP", device)]
    same(train(layers, inputs(device), recipe), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_weight_gradients(recipe, device):
    def run(wrap):
        made = build("LayerNormMLP", device, delay_wgrad_compute=True)

        def late():
            for layer in made:
                layer.backward_dw()

        return train([wrap(layer) for layer in made], inputs(device), recipe, after=late)

    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    same(run(lambda layer: Offloaded(layer, context, sync)), run(lambda layer: layer))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_kept_stay(recipe, device):
    """Later microbatches use the quantized weights of the first one; the module owns them, and they are not
    offloaded."""
    options = ({"is_first_microbatch": True}, {"is_first_microbatch": False}, {"is_first_microbatch": False})
    expected = train(build("LayerNormMLP", device), inputs(device), recipe, options)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    layers = [Offloaded(layer, context, sync) for layer in build("LayerNormMLP", device)]
    same(train(layers, inputs(device), recipe, options), expected)
    kept = context.offload_synchronizer.get_offloaded_total_size_mb()
    train(layers, inputs(device), recipe)
    moved = context.offload_synchronizer.get_offloaded_total_size_mb()
    assert kept == moved if "high_precision" in recipe else kept < moved  # if no FP8 copy is saved for a backward


@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_layers(recipe, device):
    """Layers captured one by one with their contexts inside, against an eager run without."""
    expected = train(build("LayerNormMLP", device), inputs(device), recipe)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    warm = [Offloaded(layer, context, sync) for layer in build("LayerNormMLP", device)]
    train(warm, inputs(device, 1), recipe)  # allocates the pinned memory
    layers = [Offloaded(layer, context, sync) for layer in build("LayerNormMLP", device)]
    samples = tuple((torch.randn_like(inputs(device, 1)[0]).requires_grad_(),) for _ in layers)
    te.make_graphed_callables(
        tuple(layers),
        samples,
        enabled=True,
        recipe=RECIPES[recipe](),
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    same(train(layers, inputs(device), recipe), expected)


def test_quantized_parameters_stay(device):
    """quantized_model_init: their data belongs to parameters; as many bytes are offloaded as with cached weights."""

    def moved(layers, **options):
        context, sync = te.get_cpu_offload_context(True, K, LAYERS)
        train([Offloaded(layer, context, sync) for layer in layers], inputs(device, 1), "current", (options,))
        return context.offload_synchronizer.get_offloaded_total_size_mb()

    with te.quantized_model_init(recipe=RECIPES["current"]()):
        layers = build("LayerNormMLP", device)
    assert moved(layers) == moved(build("LayerNormMLP", device), is_first_microbatch=True) > 0
