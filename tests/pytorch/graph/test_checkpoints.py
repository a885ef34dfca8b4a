# Checkpoints around captured callables, and inside of them, under quantization, with several microbatches in flight: a
# recomputation reads the scales and the weights that its first run read, and leaves those of now. Mutants: a first run
# that leaves the forward's scales where they are, or a recomputation by those of now, turn these red.
import collections
import copy
from contextlib import nullcontext

import pytest
import torch
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.graph.backend.cpu import RecordedStream
from transformer_engine.pytorch.graph.replay.runner import GraphRunner
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .cases import Recording, assert_same_step, build, left_by, linear, mlp, norm_linear, tokens
from .fp8_cases import RECIPES, around, assert_same_states, states

pytestmark = pytest.mark.usefixtures("fp8_left_off")
BF16 = torch.bfloat16
ORDERS = {
    "one by one": [1, -1, 1, -1],
    "two in flight": [1, 1, -1, -1],
    "three": [1, 1, -1, 1, -1, -1],
}


class Inside(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, **kwargs):
        return torch.tanh(te.checkpoint(self.inner, x, **kwargs))


def plainly(call, x, **kwargs):
    return call(x, **kwargs)


def checkpointed(call, x, **kwargs):
    return te.checkpoint(call, x, **kwargs)


def by_hand(call, x, **kwargs):
    """A checkpoint as frameworks write it, with only the recompute phases around."""
    return ByHand.apply(call, kwargs, x)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, kwargs, x):
        ctx.call, ctx.kwargs, ctx.x = call, kwargs, x.detach()
        ctx.around = FP8GlobalStateManager.get_fp8_autocast_state()
        with activation_recompute_forward(True, False):
            return call(x, **kwargs)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.x.requires_grad_()
        enabled, _, recipe, group, _ = ctx.around
        again = te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
        with torch.enable_grad(), again, activation_recompute_forward(True, True):
            y = ctx.call(x, **ctx.kwargs)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


def run(calls, entries, inputs, name, *, way, cached, inside, first):
    """One step in that order; every microbatch's result and the gradient of its input."""
    found, alive, done = {}, {}, {1: 0, -1: 0}
    with around(name) if inside else nullcontext():
        for entry in entries:
            m, done[entry] = done[entry], done[entry] + 1
            if entry > 0:
                x = inputs[m].clone().requires_grad_()
                options = {"is_first_microbatch": m in first} if cached else {}
                with nullcontext() if inside else around(name):
                    alive[m] = x, way(calls[m], x, **options)
                found[f"{m} y"] = alive[m][1].detach().clone()
            else:
                x, y = alive.pop(m)
                y.backward(torch.sin(found[f"{m} y"].float() * 7).to(y) * 3.0**-m)
                found[f"{m} dx"] = x.grad
    return found


def assert_graphs_equal_eager(module, device, entries, name, *, way, cached=False, inside=False, first=(0,), **options):
    eager, count = copy.deepcopy(module), entries.count(1)
    graphed = te.make_graphed_callables(
        (module,),
        tuple((tokens(device, BF16, grad=True),) for _ in range(count)),
        _order=entries,
        enabled=True,
        recipe=RECIPES[name],
        cache_quantized_params=cached,
        **options,
    )
    for seed in range(4):
        inputs = [tokens(device, BF16) * 8.0 ** ((m + seed) % 3) for m in range(count)]
        found = []
        for m, calls in ((module, graphed), (eager, [eager] * count)):
            left = run(calls, entries, inputs, name, way=way, cached=cached, inside=inside, first=first)
            found.append(left | left_by(m))
        assert_same_step(*found, f"step {seed}")
        assert_same_states(states(module), states(eager), f"step {seed}")
        with torch.no_grad():  # an optimizer's step
            for p, q in zip(module.parameters(), eager.parameters()):
                p.mul_(1.37), q.copy_(p)
                p.grad = q.grad = None


every_recipe = pytest.mark.parametrize("name", ["delayed", "delayed, most recent", "current", "block"])
every_order = pytest.mark.parametrize("order", ORDERS)


@every_recipe
@every_order
@pytest.mark.parametrize("cached", [False, True], ids=["each", "cached"])
def test_around(device, cached, order, name):
    module = build(mlp, device, BF16)
    assert_graphs_equal_eager(module, device, ORDERS[order], name, way=checkpointed, cached=cached)


@pytest.mark.parametrize("family", [linear, norm_linear, mlp], ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_around_in_one_region(device, family, inside):
    """Several modules in a callable; the autocast ends before the backwards, or surrounds the whole step."""
    module = torch.nn.Sequential(build(family, device, BF16), build(linear, device, BF16))
    entries = ORDERS["two in flight"]
    assert_graphs_equal_eager(module, device, entries, "delayed", way=checkpointed, inside=inside)


@every_order
def test_around_where_several_microbatches_quantize_the_weights(device, order):
    """A recomputation quantizes no weights again, even for the first microbatch, since other microbatches read them."""
    options = {"cached": True, "first": (0, 1)}
    module = build(linear, device, BF16)
    assert_graphs_equal_eager(module, device, ORDERS[order], "delayed", way=checkpointed, **options)


@every_order
@pytest.mark.parametrize("cached", [False, True], ids=["each", "cached"])
def test_a_checkpoint_of_ones_own_around(device, cached, order):
    entries = ORDERS[order]
    assert_graphs_equal_eager(build(linear, device, BF16), device, entries, "delayed", way=by_hand, cached=cached)


@every_recipe
@every_order
@pytest.mark.parametrize("cached", [False, True], ids=["each", "cached"])
def test_inside(device, cached, order, name):
    module = Inside(build(linear, device, BF16))
    assert_graphs_equal_eager(module, device, ORDERS[order], name, way=plainly, cached=cached)


def test_a_recomputation_without_its_first_run(device):
    """Scales and amaxes are unchanged."""
    module = build(linear, device, BF16)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, BF16, grad=True),), enabled=True, recipe=RECIPES["delayed"])
    for m in (module, eager):
        with around("delayed"):
            m(tokens(device, BF16).fill_(3).requires_grad_()).sum().backward()
    with around("delayed"), activation_recompute_forward(True, True):
        with refused(RuntimeError, "graphed callable 0 (Linear)", "first run", "te.checkpoint"):
            module(tokens(device, BF16, grad=True))
    assert_same_states(states(module), states(eager))


def test_an_exception_in_a_recomputation(device, monkeypatch):
    """The present scales are restored after an exception."""
    module = build(linear, device, BF16)
    te.make_graphed_callables(module, (tokens(device, BF16, grad=True),), enabled=True, recipe=RECIPES["delayed"])
    with around("delayed"):
        y = te.checkpoint(module, tokens(device, BF16).fill_(3).requires_grad_())
    before = states(module)

    def failing(*args):
        module.forward.record.scales.amax_rows[0].fill_(99.0)
        raise KeyError("mine")

    monkeypatch.setattr(GraphRunner, "run_forward", failing)
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    assert_same_states(states(module), before)


def test_an_owner_of_a_graph_that_updates_scales(device):
    """The owner of the graph updates the scales of the backward, also those of a checkpoint, at any time; the scales of
    the forward are updated when the region ends."""
    module = build(linear, device, BF16)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, BF16, grad=True),), enabled=True, recipe=RECIPES["delayed"])
    for way in (plainly, checkpointed):
        for _ in range(2):
            x, left = tokens(device, BF16) * 4, []
            for m in (module, eager):
                with around("delayed"):
                    assert FP8GlobalStateManager.is_first_fp8_module()
                    y = way(m, x.clone().requires_grad_())
                y.backward(torch.full_like(y, 5.0))
                left.append(states(m))
                assert left[-1][".scaling_bwd.amax_history"][0, 0] == 5.0 and left[-1][".scaling_fwd.scale"][0] != 1.0
            assert_same_states(*left)
            (
                module.fp8_meta["scaling_bwd"].amax_history[0].zero_(),
                eager.fp8_meta["scaling_bwd"].amax_history[0].zero_(),
            )


def test_on_a_stream_of_its_own_all_of_a_recomputation_is_waited_for():
    """Waits before the present scales are saved, and before they are restored; its backward waits for the event."""
    module = Recording(build(linear, "cpu", BF16), "cpu")
    te.make_graphed_callables(module, (tokens("cpu", BF16, grad=True),), enabled=True, recipe=RECIPES["delayed"])
    log = collections.deque()
    stream, main = RecordedStream("graph", log), module.forward.record.backend.current_stream()
    options = {"cuda_graph_stream": stream, "cuda_graph_event": module.event}
    main.log.clear()
    with around("delayed"):
        y = te.checkpoint(module, tokens("cpu", BF16, grad=True), **options)
    assert list(main.log) == [("main", "waits for event", module.event)]
    main.log.clear()
    y.sum().backward()
    waits = [("main", "waits for", "graph")] * 2 + [("main", "waits for event", module.event)]
    assert list(main.log) == waits


def chains(device, *, reuse):
    """Two layers, each in a checkpoint, and two microbatches in flight, captured and eager."""
    layers = [build(linear, device), build(linear, device)]
    eager = copy.deepcopy(layers)
    samples = tuple((tokens(device, grad=True),) for _ in range(4))
    g = te.make_graphed_callables(
        tuple(layers), samples, _order=[1, 1, -1, -1], _reuse_graph_input_output_buffers=reuse
    )

    def step(calls, inputs):
        ys = []
        for m, x in enumerate(inputs):
            for call in calls[2 * m : 2 * m + 2]:
                x = te.checkpoint(call, x)
            ys.append(x)
        for y in ys:
            y.sum().backward()

    return (layers, g), (eager, eager * 2), step


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_layers_in_checkpoints_of_their_own(device, reuse):
    """Each keeps its argument, the result of the previous one, until its recomputation. Recomputations of other
    microbatches run first, out of the order of the captures, and overwrite the memory of such results."""
    *both, step = chains(device, reuse=reuse)
    for _ in range(3):
        inputs, left = [tokens(device) for _ in range(2)], []
        for modules, calls in both:
            own = [x.clone().requires_grad_() for x in inputs]
            step(calls, own)
            found = {f"{i} {key}": value for i, m in enumerate(modules) for key, value in left_by(m).items()}
            left.append(found | {f"dx {m}": x.grad for m, x in enumerate(own)})
        assert_same_step(*left)
