# A framework's training of a small GPT (framework_gpt.py): with captured layers, recomputation and offload, alone and
# together, it has the losses, gradients, weights and scales of the eager run without, to the bit, and losses fall.
# Mutant: a replay that zeroes main_grads of another graph.
import dataclasses
import random

import pytest
from support import assert_same_bits

from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from ..offload.cases import small  # noqa: F401
from .framework_gpt import IN_FLIGHT, IN_TURN, LAYERS, Options, train

pytestmark = [
    pytest.mark.usefixtures("small", "fp8_left_off"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # frameworks write the older names
    pytest.mark.filterwarnings("ignore:.*without the graph.*:UserWarning"),  # its evaluation, of layers in place
]
FP8 = ("delayed", "current", "block")
WHOLE = {"graphs": "layer"}
PART = {"graphs": "attention"}
ALONE = {
    "nothing": {},
    "fused": {"fused": True},
    "offload": {"offload": True},
    "dropout": {"dropout": 0.2},
    "a layer again": {"recompute": "layer"},
    "an mlp again": {"recompute": "mlp"},
    "graphs": WHOLE,
    "graphs in flight": {**WHOLE, "order": IN_FLIGHT},
    "graphs in place": {**WHOLE, "order": None},
    "graphs of a part": PART,
    "te's layer": {"one_module": True, **WHOLE},
    "shards": {"shards": 3, "fused": True},
    "shards, graphs": {"shards": 3, "fused": True, **WHOLE},
    "shards, delayed weights": {"shards": 3, "fused": True, "recipe": "delayed", "quantized_weights": True},
    **{recipe: {"recipe": recipe} for recipe in FP8},
    **{f"{recipe}, graphs": {"recipe": recipe, **WHOLE} for recipe in FP8},
    **{f"{recipe}, kept": {"recipe": recipe, "keep_weights": True, **WHOLE} for recipe in FP8},
    **{f"{recipe}, weights": {"recipe": recipe, "quantized_weights": True, **WHOLE} for recipe in FP8},
}
_MEGA = {"fused": True, "keep_weights": True, "order": IN_FLIGHT}
TOGETHER = {
    "bf16": {**WHOLE, "fused": True, "offload": True, "order": IN_FLIGHT, "dropout": 0.1},
    "delayed": {**WHOLE, **_MEGA, "recipe": "delayed", "offload": True, "recompute": "mlp"},
    "current": {**WHOLE, **_MEGA, "recipe": "current", "offload": True, "recompute": "mlp", "dropout": 0.1},
    "block": {**WHOLE, **_MEGA, "recipe": "block", "offload": True, "recompute": "mlp"},
    "delayed, a part": {**PART, **_MEGA, "recipe": "delayed", "offload": True, "recompute": "mlp"},
    "current, a part": {**PART, **_MEGA, "recipe": "current", "quantized_weights": True},
    "delayed, again": {**WHOLE, **_MEGA, "recipe": "delayed", "order": IN_TURN, "recompute": "layer", "dropout": 0.1},
    "delayed, te's layer": {**WHOLE, **_MEGA, "recipe": "delayed", "one_module": True, "quantized_weights": True},
    "block, te's layer": {**WHOLE, **_MEGA, "recipe": "block", "one_module": True, "offload": True},
}
_eager = {}


def run(options):
    FP8GlobalStateManager.reset()
    return train(options)


def assert_as_eager(options):
    plain = options.plain
    if plain not in _eager:
        _eager[plain] = run(plain)[1]
    (model, got), want = run(options), _eager[plain]
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same_bits(got[name], tensor, name)
    losses = [got[name].mean() for name in got if name.startswith("loss")]
    assert losses[-1] < losses[0] - 0.1
    return model


@pytest.mark.parametrize("name", ALONE)
def test_one_option(device, name):
    assert_as_eager(Options(device, **ALONE[name]))


@pytest.mark.parametrize("name", TOGETHER)
def test_options_together(device, name):
    model = assert_as_eager(Options(device, **TOGETHER[name]))
    graphs = [graph for layer in model.layers for graph in layer.cuda_graphs]
    assert len(graphs) == 2 * LAYERS and all(graph.record.calls.forward_id > 0 for graph in graphs)
    if model.context is not None:
        assert model.context.offload_synchronizer.get_offloaded_total_size_mb() > 0


def drawn(rng, device):
    """Options that go together."""
    some = {
        "recipe": rng.choice((None, *FP8, "delayed")),
        "graphs": rng.choice((None, "layer", "layer", "attention")),
        "order": rng.choice((IN_TURN, IN_FLIGHT, None)),
        "recompute": rng.choice((None, None, "layer", "mlp")),
        "dropout": rng.choice((0.0, 0.0, 0.1)),
    }
    flags = ("fused", "offload", "keep_weights", "quantized_weights", "one_module")
    options = Options(device, **some, **{name: rng.random() < 0.4 for name in flags})
    fits = {}
    if options.one_module and options.graphs:
        fits["graphs"] = "layer"
    if options.one_module and options.recompute:
        fits["recompute"] = "layer"
    if options.order is None:  # in place a call is all of the captured part, and does not say which microbatch it is
        fits |= {"keep_weights": False, "graphs": options.graphs and "layer"}
    if options.recipe is None:
        fits |= {"keep_weights": False, "quantized_weights": False}
    options = dataclasses.replace(options, **fits)
    if options.graphs and options.recompute == "layer":
        options = dataclasses.replace(options, offload=False)  # refused: offload/test_graphs.py
    return options


GENERATED = 12


def test_options_at_random(device, generated_seed):
    options = drawn(random.Random(generated_seed), device)
    print(options)
    assert_as_eager(options)


@pytest.mark.parametrize("recipe", [None, *FP8])
@pytest.mark.parametrize("one_module", [False, True], ids=["layer", "te's layer"])
def test_recomputations_between_passes_in_flight(device, recipe, one_module):
    """Each replays a forward after those of later microbatches, whose results are copies: of first runs."""
    kept = recipe is not None and not one_module
    again = {**WHOLE, "order": IN_FLIGHT, "recompute": "layer", "fused": True, "keep_weights": kept}
    assert_as_eager(Options(device, recipe=recipe, one_module=one_module, **again))
