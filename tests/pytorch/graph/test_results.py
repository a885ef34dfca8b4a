# How long what a replay hands out stays as it is: results until the next call, gradients of them wherever autograd or a
# user holds one.
import copy
import random

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.replay.graphed import consumer_of

from .cases import assert_same_step, build, left_by, linear
from .orders import ORDERS, chunks_of, every_order, pipelines

WIDTH = 4
every_reuse = pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])


class Two(torch.nn.Module):
    """A layer with a second input: a skip, a context. With whole numbers, whose sums are equal in any order."""

    def __init__(self, device):
        super().__init__()
        signs = torch.randint(0, 2, (WIDTH, 1)) * 2.0 - 1
        self.weight = torch.nn.Parameter((torch.eye(WIDTH)[torch.randperm(WIDTH)] * signs).double().to(device))
        self.scale = torch.nn.Parameter(torch.randint(-1, 2, (WIDTH,)).double().to(device))

    def forward(self, x, c):
        return x @ self.weight + c * self.scale


def drawn(device):
    return torch.randint(-3, 4, (4, WIDTH)).double().to(device)


def captured(device, count, order, chunks=1, **options):
    modules = [Two(device) for _ in range(count)]
    twins = copy.deepcopy(modules)
    passes = count * sum(entry == 1 for entry in order)
    samples = tuple((drawn(device).requires_grad_(), drawn(device).requires_grad_()) for _ in range(passes))
    return te.make_graphed_callables(tuple(modules), samples, _order=order, **options), modules, twins


def assert_same_gradients(modules, twins):
    for i, (module, twin) in enumerate(zip(modules, twins)):
        assert_same_step(left_by(module), left_by(twin), f"layer {i}")


# ---- results ----


@every_order
@pytest.mark.parametrize("layers", [1, 3])
@every_reuse
def test_results_are_valid_until_the_next_call(device, name, layers, reuse):
    """Results of every layer, also after their backward."""
    order = ORDERS[name]
    waits = [any(entry == -chunk - 1.5 for entry in order) for chunk in range(chunks_of(order))]
    modules = [build(linear, device, delay_wgrad_compute=wait) for wait in waits for _ in range(layers)]
    graphed, pipeline, _ = pipelines(modules, order, layers, device, _reuse_graph_input_output_buffers=reuse)
    held, over = {}, set()

    def look():
        for i, (y, values) in held.items():
            assert_same_bits(y.detach(), values, f"result of pass {i}")

    def call(_, i, x):
        look()
        for done in over:
            del held[done]
        over.clear()
        y = graphed[i](x)
        y.register_hook(lambda _: over.add(i))
        held[i] = y, y.detach().clone()
        return y

    pipeline.call = call
    for seed in range(2):
        pipeline.run(seed, device)
        look()
    assert over


def test_a_saved_result_that_was_overwritten_raises(device):
    """An eager operation that saved it raises in a backward after the next call, as after an in-place write."""
    modules = (torch.nn.Linear(4, 4, device=device), torch.nn.Linear(4, 6, device=device))
    samples = tuple((torch.randn(3, 4, device=device).requires_grad_(),) for _ in modules)
    graphed = te.make_graphed_callables(modules, samples, _order=[1, -1], _reuse_graph_input_output_buffers=True)
    weight = torch.ones(6, device=device, requires_grad=True)
    for called in (False, True):
        y = graphed[1](graphed[0](torch.randn(3, 4, device=device).requires_grad_()))
        beside = (weight * y.detach()).sum()
        y.sum().backward()
        if called:
            graphed[0](torch.randn(3, 4, device=device).requires_grad_())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                beside.backward()
        else:
            beside.backward()
            assert_same_bits(weight.grad, y.detach().sum(0))


# ---- gradients ----


def wiring(seed, layers):
    """The inputs of each layer, (which result, the operation on it) twice, and those of the loss beside the last
    one."""
    draw = random.Random(seed)
    ways = ["as it is", "as it is", "as it is", "scaled", "view"]
    takes = [
        [(draw.randrange(-1, layer) if draw.random() < 0.5 else layer - 1, draw.choice(ways)) for _ in "xc"]
        for layer in range(layers)
    ]
    return takes, [i for i in range(layers - 1) if draw.random() < 0.3]


def forward(layers, x, takes, reads):
    made = {"as it is": lambda t: t, "scaled": lambda t: t * 2, "view": lambda t: t.view(-1).view(t.shape)}
    results = {-1: x}
    for i, (layer, own) in enumerate(zip(layers, takes)):
        results[i] = layer(*[made[way](results[which]) for which, way in own])
    loss = results[len(layers) - 1].square().sum()
    for i in reads:
        loss = loss + (results[i] * (i + 2)).sum()
    return loss, results


@every_reuse
@pytest.mark.parametrize("retain", [False, True], ids=["once", "retained"])
@pytest.mark.parametrize("order", [[1, -1], [1, 1, -1, -1], [1, -1, 1, -1], [1, 2, 1, 2, -2, -1, -2, -1]], ids=str)
def test_results_with_several_consumers(device, order, retain, reuse):
    """Skips, contexts, a result used twice by one layer, eager operations in between: layers of one step in random
    wirings, with microbatches in flight as in the order."""
    count, chunks = 6, max(order)
    layers = count // chunks
    graphed, modules, twins = captured(
        device, count, order, retain_graph_in_backward=retain, _reuse_graph_input_output_buffers=reuse
    )
    microbatches = sum(entry == 1 for entry in order)

    def calls(microbatch):
        first = [c * layers * microbatches + microbatch * layers for c in range(chunks)]
        return [graphed[start + i] for start in first for i in range(layers)]

    # All chunks of a microbatch run forward, and backward, without another microbatch in between.
    pieces = [entry for entry in order if abs(entry) == chunks]
    for seed in range(5):
        takes, reads = wiring(seed, count)
        inputs = [drawn(device) for _ in range(microbatches)]
        for stack in (calls, lambda _: twins):
            alive, given, turn = [], [x.clone().requires_grad_() for x in inputs], 0
            for entry in pieces:
                if entry > 0:
                    alive.append(forward(stack(turn), given[turn], takes, reads)[0])
                    turn += 1
                    continue
                loss = alive.pop(0)
                if retain:
                    loss.backward(retain_graph=True)
                loss.backward()
            if stack is calls:
                got = given
        for own, wanted in zip(got, given):
            assert_same_bits(own.grad, wanted.grad, f"wiring {seed}")
        assert_same_gradients(modules, twins)


@every_reuse
@pytest.mark.parametrize("way", ["autograd.grad", "hooks", "retain_grad"])
def test_gradients_of_results_are_the_callers(device, way, reuse):
    """Requested beside those of the inputs, or kept by a hook: nothing overwrites them, in this backward or later."""
    graphed, _, twins = captured(device, 5, [1, -1], _reuse_graph_input_output_buffers=reuse)
    for seed in range(4):
        takes, reads = wiring(seed, 5)
        x, found = drawn(device), []
        for layers in (graphed, twins):
            own = x.clone().requires_grad_()
            loss, results = forward(layers, own, takes, reads)
            inner = [results[i] for i in range(4) if results[i].requires_grad]
            if way == "autograd.grad":
                found.append(torch.autograd.grad(loss, [*inner, own], allow_unused=True))
                continue
            kept = {}
            for i, t in enumerate(inner):
                if way == "hooks":
                    t.register_hook(lambda g, i=i, kept=kept: kept.update({i: g}))
                else:
                    t.retain_grad()
            loss.backward()
            found.append([kept.get(i) if way == "hooks" else t.grad for i, t in enumerate(inner)] + [own.grad])
        for again in (False, True):
            if again:
                forward(graphed, drawn(device).requires_grad_(), takes, reads)[0].backward()
            for i, (got, wanted) in enumerate(zip(*found, strict=True)):
                assert (got is None) == (wanted is None)
                if got is not None:
                    assert_same_bits(got, wanted, f"wiring {seed}, gradient {i}")


@pytest.mark.parametrize("kept", ["with the gradient", "in another's place"])
@every_reuse
def test_a_hook_that_keeps_a_gradient_and_gives_another(device, kept, reuse):
    """Callables that return the incoming gradient itself, in whose buffer the next incoming gradient is copied."""

    class Same(torch.nn.Module):
        def forward(self, x):
            return x.view(-1).view(x.shape)

    graphed = te.make_graphed_callables(
        tuple(Same() for _ in range(4)),
        tuple((drawn(device).requires_grad_(),) for _ in range(4)),
        _order=[1, -1],
        _reuse_graph_input_output_buffers=reuse,
    )
    x, found = drawn(device).requires_grad_(), []
    y = x
    for call in graphed:
        y = call(y)

        def hook(g):
            found.append(g)
            return g * 2 if kept != "with the gradient" else None

        y.register_hook(hook)
    first = drawn(device)
    y.backward(first)
    for i, got in enumerate(found):
        assert_same_bits(got, first * (2.0**i if kept != "with the gradient" else 1), f"hook {i}")


@pytest.mark.parametrize("apart", [False, True], ids=["one capture", "apart"])
@pytest.mark.parametrize("checkpoint", [te.checkpoint, torch.utils.checkpoint.checkpoint], ids=["te", "torch"])
@every_reuse
def test_a_gradient_that_waits_while_its_callable_runs_again(device, apart, checkpoint, reuse):
    """A sum of a call and of a checkpoint around another call: the second is recomputed, forward and backward, between
    the backward of the first and that of the previous layer."""
    modules = [torch.nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.float64) for _ in range(2)]
    twins = copy.deepcopy(modules)

    def sample():
        return (drawn(device).requires_grad_(),)

    if apart and reuse:
        pytest.skip("shared buffers need an order, which is one capture")
    if apart:
        first, second = (te.make_graphed_callables(module, sample()) for module in modules)
    else:
        first, second = te.make_graphed_callables(
            tuple(modules), (sample(), sample()), _order=[1, -1], _reuse_graph_input_output_buffers=reuse
        )
    x, grads = drawn(device), []
    for a, b in ((first, second), (twins[0], twins[1])):
        own = x.clone().requires_grad_()
        inner = a(own)
        again = checkpoint(b, inner, use_reentrant=True)  # its call comes first, so its backward last
        y = b(inner).square() + again
        y.backward(torch.ones_like(y))
        grads.append(own.grad)
    assert_same_bits(*grads)
    assert_same_gradients(modules, twins)


@every_reuse
def test_a_gradient_for_the_next_captured_backward_is_not_copied(device, reuse):
    """It is read before anything is written; a gradient that autograd sums is a copy."""
    graphed, *_ = captured(device, 3, [1, -1], _reuse_graph_input_output_buffers=reuse)
    x, seen = drawn(device).requires_grad_(), []
    first = graphed[0](x, x)
    second = graphed[1](first, first)
    second.register_hook(lambda g: seen.append(g.data_ptr()))
    graphed[2](second, first).sum().backward()
    assert seen == [graphed[2].record.backward_graph.grad_inputs[0].data_ptr()]
    assert consumer_of(graphed[1]._runner, first.grad_fn) is graphed[0].record
    assert consumer_of(graphed[2]._runner, first.grad_fn) is None


def test_a_result_that_nothing_reads_has_no_gradient(device):
    """Not that of the call before."""
    x = torch.ones(4, device=device, requires_grad=True)
    graphed = te.make_graphed_callables(lambda x: (x * 2, x * 3), (x,))
    for wanted, factor in (((0, 1), 5), ((0,), 2), ((1,), 3)):
        y = graphed(x)
        (grad,) = torch.autograd.grad(sum(y[i].sum() for i in wanted), x)
        assert (grad == factor).all()
