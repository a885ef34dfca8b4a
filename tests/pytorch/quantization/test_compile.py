# Recipes under torch.compile: what cannot be traced is refused in its own words, whole graph or not, and nothing is
# left switched on; recipes that are made in the compiled function are as good as others.
import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantization.state.autocast_state import current_state
from transformer_engine.pytorch.torch_version import torch_version

pytestmark = pytest.mark.usefixtures("fp8_left_off")
fullgraph = pytest.mark.parametrize("fullgraph", [True, False])
REFUSED = {
    "delayed": (DelayedScaling(), "DelayedScaling: its scales are state that torch.compile cannot follow"),
    "default": (None, "DelayedScaling: its scales are state that torch.compile cannot follow"),
    "custom": (CustomRecipe(qfactory=lambda role: None), "CustomRecipe: its scales are state"),
    "another machine's": (MXFP8BlockScaling(), "MXFP8BlockScaling: products that need a Blackwell GPU"),
}


def compiled(function, fullgraph):
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


def check_refused(call, words):
    wanted = NotImplementedError
    if torch_version() < (2, 10):  # Dynamo's own words for an error inside of a context in a whole graph
        wanted = (NotImplementedError, torch._dynamo.exc.Unsupported)
    with pytest.raises(wanted) as caught:
        call()
    assert str(caught.value).startswith(words) or type(caught.value) is not NotImplementedError
    assert not FP8GlobalStateManager.is_fp8_enabled() and current_state().depth == 0


@fullgraph
@pytest.mark.parametrize("name", REFUSED)
def test_state_is_refused_in_its_own_words(device, name, fullgraph):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    recipe, words = REFUSED[name]

    def inside(t):
        with te.autocast(recipe=recipe):
            return module(t)

    def around():
        with te.autocast(recipe=recipe):
            compiled(module, fullgraph)(x)

    check_refused(lambda: compiled(inside, fullgraph)(x), words)
    torch.compiler.reset()
    check_refused(around, words)


@fullgraph
def test_a_recipe_that_is_made_there_is_refused_so_too(device, fullgraph):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)

    def inside(t):
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return module(t)

    def calibrating(t):
        with te.autocast(enabled=False, calibrating=True):
            return module(t)

    check_refused(lambda: compiled(inside, fullgraph)(x), "DelayedScaling: its scales are state")
    check_refused(lambda: compiled(calibrating, fullgraph)(x), "Linear: calibrating is not available")


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_a_recipe_is_made_in_the_graph(device, kind):
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)

    def call(t):
        with te.autocast(recipe=kind()):
            return module(t)

    found = []
    for function in (call, compiled(call, True)):
        module.zero_grad()
        y = function(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in module.parameters())])
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("recipe", ["delayed", "custom", "current"])
def test_where_a_graph_breaks_inside_of_an_autocast(device, recipe):
    """The module runs uncompiled, in an autocast that was entered by compiled code."""
    module, x = te.Linear(16, 16, device=device), randn(8, 16, device=device)
    made = Float8CurrentScaling() if recipe == "current" else REFUSED[recipe][0]
    uncompiled = torch.compiler.disable(module)

    def call(t):
        with te.autocast(recipe=made):
            return uncompiled(t)

    run = compiled(call, False)
    if recipe == "current":
        wanted = call(x)
        for _ in range(2):
            assert_same_bits(run(x), wanted)
    else:
        words = (
            f"Linear: te.autocast was entered by code that torch.compile has compiled, in which {type(made).__name__}"
        )
        with pytest.raises(NotImplementedError, match=words):
            run(x)
    assert not FP8GlobalStateManager.is_fp8_enabled() and current_state().depth == 0
