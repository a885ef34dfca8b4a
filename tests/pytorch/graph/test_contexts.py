# Captured callables inside other code: checkpoints, captures, modules that get other tensors.
import copy

import pytest
import torch
from support import refused
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

from .cases import assert_same_step, build, capture, linear, mlp, step, tokens, twins


def checkpointed(layers, run):
    """A function with two layers and an operation that saves, recomputed."""

    def function(x):
        return layers[1](torch.sin(layers[0](x)))

    return lambda x: run(function, x)


def test_checkpoints_around_captured_callables(device):
    """A recomputation is a normal call if the first run has no graph; otherwise it is refused."""
    layers = [build(linear, device), build(mlp, device)]
    eager = copy.deepcopy(layers)
    for layer in layers:
        capture(layer, device)
    stack, twin = torch.nn.ModuleList(layers), torch.nn.ModuleList(eager)
    x = tokens(device)
    for run in (te.checkpoint, lambda f, x: checkpoint(f, x, use_reentrant=True)):
        got = step(stack, x, 1, call=checkpointed(stack, run))
        assert_same_step(got, step(twin, x, 1, call=checkpointed(twin, run)))
    with refused(RuntimeError, "use_reentrant=False", "te.checkpoint", "use_reentrant=True", "capture the checkpoint"):
        step(stack, x, 1, call=checkpointed(stack, lambda f, x: checkpoint(f, x, use_reentrant=False)))
    stack.zero_grad(), twin.zero_grad()
    run = te.checkpoint
    got = step(stack, x, 2, call=checkpointed(stack, run))
    assert_same_step(got, step(twin, x, 2, call=checkpointed(twin, run)))


def test_a_backward_that_ran_is_not_another_call(device):
    module = build(linear, device)
    capture(module, device)
    y = module(tokens(device, grad=True)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its backward ran already") as error:
        y.backward()
    assert "checkpoint" not in str(error.value) and "retain_graph_in_backward" in str(error.value)


def test_a_replay_inside_a_capture_is_refused(device):
    inner, eager = twins(linear, device)
    outer = build(linear, device)
    capture(inner, device)
    with refused(RuntimeError, "graphed callable 0 (Linear)", "inside another capture", "reset()"):
        te.make_graphed_callables(lambda x: inner(outer(x)), (tokens(device, grad=True),))
    assert not is_graph_capturing()
    x = tokens(device)
    assert_same_step(step(inner, x, 1), step(eager, x, 1))
    inner.reset()
    inner.zero_grad()
    stack = torch.nn.Sequential(outer, inner)
    twin = copy.deepcopy(stack)
    capture(stack, device)
    assert_same_step(step(stack, x, 1), step(twin, x, 1))


CHANGES = {
    "to": (lambda m: m.to(torch.bfloat16), "a conversion or a move"),
    "half": (lambda m: m.half(), "a conversion or a move"),
    "assign": (
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
        "load_state_dict(assign=True)",
    ),
}


@pytest.mark.parametrize("around", [False, True], ids=["itself", "its parent"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", [linear, mlp], ids=lambda f: f.__name__)
def test_a_module_that_got_other_tensors(device, family, change, around):
    module, eager = twins(family, device)
    before = set(vars(module))
    capture(module, device)
    do, word = CHANGES[change]
    for m in (module, eager):
        do(torch.nn.Sequential(m) if around else m)
    dtype = next(module.parameters()).dtype
    with refused(RuntimeError, type(module).__name__, word, "other tensors", "reset()", "capture again"):
        module(tokens(device, grad=True))
    module.reset()
    assert set(vars(module)) == before and not module._load_state_dict_post_hooks
    for seed in range(2):
        x = tokens(device, dtype)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        if seed == 0:
            capture(module, device, dtype)


def test_what_leaves_the_tensors_in_place_is_nothing(device):
    module, eager = twins(mlp, device)
    capture(module, device)
    state = {name: value.clone() for name, value in eager.state_dict().items()}
    for m in (module, eager):
        m.to(device), m.float(), m.load_state_dict(state), torch.nn.Sequential(m).to(device)
    x = tokens(device)
    assert_same_step(step(module, x, 1), step(eager, x, 1))


@pytest.mark.parametrize(
    ("own", "equal", "others"),
    [
        ((-1, 0), (-1, 0), [(-1, 0.0), (-1, False), [-1, 0], (-1,), (-1, 0, 0), None, (0, -1), -1]),
        (((1, float("nan")), "a"), ((1, float("nan")), "a"), [((1, 2.0), "a"), ((1, float("nan")), "b"), ("a",)]),
        ((), (), [(None,), None, []]),
    ],
    ids=["window", "nested", "empty"],
)
def test_a_tuple_of_constants_keeps_the_rules_of_each(device, own, equal, others):
    graphed = te.make_graphed_callables(
        lambda x, window: x * (1 + len(window)), (tokens(device),), sample_kwargs={"window": own}
    )
    x = tokens(device)
    assert torch.equal(graphed(x, window=equal), x * (1 + len(own)))
    for other in others:
        with refused(ValueError, "argument 'window'", "part of the graph"):
            graphed(x, window=other)
    with refused(TypeError, "'window'", "missing"):
        graphed(x)


def test_a_tuple_with_a_tensor_is_walked(device):
    graphed = te.make_graphed_callables(
        lambda x, pair: x * pair[0] + pair[1], (tokens(device),), sample_kwargs={"pair": (tokens(device), 2)}
    )
    x, y = tokens(device), tokens(device)
    assert torch.equal(graphed(x, pair=(y, 2)), x * y + 2)
    with refused(ValueError, "argument 'pair'[1]", "3"):
        graphed(x, pair=(y, 3))


def test_a_buffer_that_came_later_is_no_other_tensor(device):
    """Like a table that the first evaluation creates."""
    module = build(linear, device)
    capture(module, device)
    module.register_buffer("table", torch.ones(2, device=device), persistent=False)
    module.load_state_dict(module.state_dict())
    module(tokens(device, grad=True))
