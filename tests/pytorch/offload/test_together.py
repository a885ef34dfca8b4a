# Offload beside everything else that keeps or makes tensors: each recipe with recomputation of every kind, delayed
# weight gradients, graphs gone through twice, microbatches in flight, captured layers and pipelines, over two optimizer
# steps: outputs, input and parameter gradients are the bits of a run without.
import contextlib

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from .cases import small  # noqa: F401

pytestmark = pytest.mark.usefixtures("small", "fp8_left_off")

HIDDEN, HEADS, LAYERS = 64, 4, 4
TOKENS = (16, 2)
FFN = [128, 64, 192, 96]  # layers of uneven size
RECIPES = {
    "bf16": None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}
OWN = {  # how a module saves less, or computes later
    "Linear": {"plain": {}, "delayed wgrad": {"delay_wgrad_compute": True}},
    "LayerNormLinear": {
        "plain": {},
        "norm again": {"recompute_norm_output": True},
        "delayed wgrad": {"delay_wgrad_compute": True},
    },
    "LayerNormMLP": {
        "plain": {},
        "norm again": {"recompute_norm_output": True},
        "activation in fp8": {"save_preactivation": "fp8"},
        "all again": {"checkpoint": True},
        "delayed wgrad": {"delay_wgrad_compute": True},
        "delayed wgrad, all again": {"delay_wgrad_compute": True, "checkpoint": True},
    },
    "TransformerLayer": {"plain": {}, "norm again": {"recompute_norm_output": True}, "attention again": {}},
}
CASES = [(family, how) for family, ways in OWN.items() for how in [*ways, "te.checkpoint"]]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_case = pytest.mark.parametrize("family, how", CASES, ids=map("-".join, CASES))


class Layer(torch.nn.Module):
    """One module of a family, inside of its context if it has one."""

    def __init__(self, family, how, i, device, context=None, sync=None):
        super().__init__()
        options = {"device": device, "params_dtype": torch.bfloat16, **OWN[family].get(how, {})}
        if family == "Linear":
            self.inner = te.Linear(HIDDEN, HIDDEN, bias=i % 2 == 0, **options)
        elif family == "LayerNormLinear":
            self.inner = te.LayerNormLinear(HIDDEN, HIDDEN, normalization=("RMSNorm", "LayerNorm")[i % 2], **options)
        elif family == "LayerNormMLP":
            self.inner = te.LayerNormMLP(HIDDEN, FFN[i], activation=("swiglu", "gelu")[i % 2], **options)
        else:
            dropout = 0.0 if how == "te.checkpoint" else 0.1  # a checkpoint that draws cannot be captured on a GPU
            options |= {"attention_dropout": 0.0, "hidden_dropout": dropout, "fuse_qkv_params": True}
            self.inner = te.TransformerLayer(HIDDEN, FFN[i], HEADS, **options)
        self.how, self.context, self.sync = how, context, sync

    def run(self, x):
        if self.how == "te.checkpoint":
            return te.checkpoint(self.inner, x)
        if self.how == "attention again":
            return self.inner(x, checkpoint_core_attention=True)
        return self.inner(x)

    def forward(self, x):
        if self.context is None:
            return self.run(x)
        with self.context:
            x = self.run(x)
        return self.sync(x)


def build(family, how, device, *contexts):
    """LAYERS layers; contexts: none, one for all of them, or one for each chunk."""
    torch.manual_seed(0)
    made, per = [], LAYERS // max(1, len(contexts))
    for i in range(LAYERS):
        made.append(Layer(family, how, i, device, *(contexts[i // per] if contexts else ())))
    return made


def draw(device, seed, count):
    torch.manual_seed(seed)
    return [randn(*TOKENS, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(count)]


def train(layers, recipe, device, schedule, steps=2):
    """Runs optimizer steps with microbatches in the order of `schedule`; returns all results."""
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer, results = torch.optim.SGD(parameters, lr=0.05), []
    for seed in range(steps):
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(seed)  # dropout
        results += schedule(layers, RECIPES[recipe], seed, device)
        results += [p.grad.clone() for p in parameters]
        optimizer.step()
    return results


def autocast(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and recipe())


def late(layers, count):
    for layer in layers:
        if "delayed wgrad" in layer.how:
            for _ in range(count):
                (layer if hasattr(layer, "backward_dw") else layer.inner).backward_dw()  # captured, or not


def in_flight(count, twice=False):
    """All forwards, then all backwards; twice: all backwards run again over the same graphs."""

    def run(layers, recipe, seed, device):
        given = [x.requires_grad_() for x in draw(device, seed, count)]
        outputs = []
        with autocast(recipe):
            for x in given:
                y = x
                for layer in layers:
                    y = layer(y)
                outputs.append(y)
        for again in range(1 + twice):
            for y in outputs:
                y.backward(torch.ones_like(y), retain_graph=twice and not again)
            late(layers, count)
        return [*(y.detach().clone() for y in outputs), *(x.grad for x in given)]

    return run


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")


def contexts(count=1, k=2):
    per = LAYERS // count
    return [te.get_cpu_offload_context(True, min(k, per - 1), per) for _ in range(count)]


def turns(count):
    """Two chunks that alternate in one context: a warning reports that one does not depend on the other."""
    return (
        pytest.warns(RuntimeWarning, match="sync_fn: the result of layer") if count == 1 else contextlib.nullcontext()
    )


def assert_left(*made):
    """Every context has used pinned memory."""
    assert all(context.offload_synchronizer.pinned_usage()["peak"] > 0 for context, _ in made)


@every_recipe
@every_case
def test_microbatches_in_flight(family, how, recipe, device):
    expected = train(build(family, how, device), recipe, device, in_flight(2))
    (made,) = contexts()
    same(train(build(family, how, device, made), recipe, device, in_flight(2)), expected)
    assert made[0].offload_synchronizer.get_offloaded_total_size_mb() > 0
    made[0].offload_synchronizer.forget_step()
    assert made[0].offload_synchronizer.pinned_usage()["slots"] == 0


@every_recipe
@every_case
def test_retained_graphs(family, how, recipe, device):
    expected = train(build(family, how, device), recipe, device, in_flight(2, twice=True))
    (made,) = contexts(k=3)
    same(train(build(family, how, device, made), recipe, device, in_flight(2, twice=True)), expected)


def capture(layers, made, recipe, device, count, **options):
    """Each layer's graph for each microbatch."""
    for context, _ in made:
        context.offload_synchronizer.reserve_pinned(8 << 20, device)

    def switch(on):
        for context, _ in made:
            context.enable() if on else context.disable()

    options |= {"pre_warmup_hook": lambda: switch(False), "post_warmup_hook": lambda: switch(True)}
    samples = tuple((torch.zeros_like(draw(device, 9, 1)[0]).requires_grad_(),) for _ in range(count * len(layers)))
    recipe = RECIPES[recipe]
    return te.make_graphed_callables(
        tuple(layers), samples, enabled=recipe is not None, recipe=recipe and recipe(), **options
    )


@every_recipe
@every_case
def test_captured_layers(family, how, recipe, device):
    expected = train(build(family, how, device), recipe, device, in_flight(1))
    (made,) = contexts()
    layers = build(family, how, device, made)
    capture(layers, [made], recipe, device, 1)
    same(train(layers, recipe, device, in_flight(1)), expected)
    if (family, how) == ("LayerNormMLP", "plain"):  # others may save only the input of the graph, which stays
        assert_left(made)


# 1F1B of two chunks, four microbatches.
ORDER = [1, 1, 2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -2, -2, -1, -1]
CHUNKS, MICROBATCHES, PER = 2, 4, LAYERS // 2


def pipeline(passes=None):
    """The order over captured callables, or over the layers themselves."""

    def run(layers, recipe, seed, device):
        given = {(c, m): x for c in range(CHUNKS) for m, x in enumerate(draw(device, seed + 10 * c, MICROBATCHES))}
        done, alive, results = {}, {}, []
        for entry in ORDER:
            chunk = abs(entry) - 1
            m = done[entry] = done.get(entry, -1) + 1
            if entry > 0:
                y = own = given[chunk, m].clone().requires_grad_()
                with autocast(recipe):
                    for layer in range(PER):
                        index = chunk * MICROBATCHES * PER + m * PER + layer
                        y = (layers[chunk * PER + layer] if passes is None else passes[index])(y)
                alive[chunk, m] = own, y
                results.append(y.detach().clone())
            else:
                own, y = alive.pop((chunk, m))
                y.backward(torch.ones_like(y))
                results.append(own.grad.clone())
        late(layers, MICROBATCHES)
        return results

    return run


@every_recipe
@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("count", [1, 2], ids=["one context", "one a chunk"])
def test_a_pipeline(family, count, recipe, device):
    expected = train(build(family, "plain", device), recipe, device, pipeline())
    made = contexts(count)
    with turns(count):
        same(train(build(family, "plain", device, *made), recipe, device, pipeline()), expected)
    assert_left(*made)


@every_recipe
@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
@pytest.mark.parametrize("count", [1, 2], ids=["one context", "one a chunk"])
def test_a_captured_pipeline(family, count, reuse, recipe, device):
    expected = train(build(family, "plain", device), recipe, device, pipeline())
    made = contexts(count)
    layers = build(family, "plain", device, *made)
    passes = capture(
        layers,
        made,
        recipe,
        device,
        MICROBATCHES,
        _order=ORDER,
        _num_layers_per_chunk=PER,
        _reuse_graph_input_output_buffers=reuse,
    )
    same(train(layers, recipe, device, pipeline(passes)), expected)
    if family in ("LayerNormMLP", "TransformerLayer"):
        assert_left(*made)


@every_recipe
@every_case
def test_the_memory_plan_counts_what_leaves(family, how, recipe, device):
    """Byte by byte, including the copies of weights that one step makes; other rows equal those without offload."""
    ((context, sync),) = contexts()
    stack = torch.nn.Sequential(*build(family, how, device, (context, sync)))
    statuses = ("kept", "offloaded", "recomputed", "parameter", "input")

    def planned():
        with autocast(RECIPES[recipe]):
            plan = te.memory_plan(stack, draw(device, 0, 1)[0].requires_grad_())
        found = {status: plan.bytes_of(status) for status in statuses}
        on_the_host_anyway = (row for row in plan.rows if row.op == "checkpoint" and row.status == "offloaded")
        found["offloaded"] -= sum(row.bytes for row in on_the_host_anyway)  # random states of checkpoints
        return found

    plan = planned()
    assert plan["offloaded"] == round(context.offload_synchronizer.get_offloaded_total_size_mb() * 2**20) > 0
    context.disable()
    without = planned()
    assert without["offloaded"] == 0 and plan["recomputed"] == without["recomputed"]
    assert sum(plan.values()) == sum(without.values())
