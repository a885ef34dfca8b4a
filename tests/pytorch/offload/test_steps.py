# The first layer of a step: layers are numbered right however the earlier forward ended, or a warning gives the reason
# why they may not be.
import copy
import gc
import pickle
import threading
import warnings

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload

from .cases import forward, small, step  # noqa: F401

pytestmark = pytest.mark.usefixtures("small")
N, K = 4, 2


class Layer(torch.nn.Module):
    """Records the layer number that the context assigns."""

    def __init__(self, seen, device):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, device=device)
        self.seen, self.context, self.fails = seen, None, False

    def forward(self, x):
        if self.context is not None:
            self.seen.append(int(self.context.offload_synchronizer.number))
        if self.fails:
            raise ArithmeticError
        return torch.tanh(self.linear(x))


class Stack:
    def __init__(self, device):
        self.seen = []
        self.layers = [Layer(self.seen, device) for _ in range(N)]
        self.x = randn(8, 16, device=device)
        self.expected = [t.clone() for t in step(self.layers, [self.x])]
        self.context, self.sync = te.get_cpu_offload_context(True, K, N)
        for layer in self.layers:
            layer.context = self.context

    def forward(self, layers=N):
        return forward(self.layers[:layers], self.x.clone().requires_grad_(), self.context, self.sync)

    def goes_on(self, alive=False):
        """The next step's layers are numbered from the first one on, and its bits are those of a run without."""
        self.seen.clear()
        for got, wanted in zip(step(self.layers, [self.x], self.context, self.sync), self.expected, strict=True):
            assert_same_bits(got, wanted)
        assert self.seen == list(range(N))
        assert alive or self.context.offload_synchronizer.pinned_usage()["slots"] == 0


@pytest.fixture
def stack(device):
    """After the test, when no graph is alive, no pinned memory is in use."""
    made = Stack(device)
    yield made
    made.context.offload_synchronizer.forget_step()
    gc.collect()  # tracebacks refer to each other
    assert made.context.offload_synchronizer.pinned_usage()["slots"] == 0


def failing(stack, layers):
    """A forward that fails after the context of its last layer, before the layer is ended."""
    x = stack.x.clone().requires_grad_()
    x = forward(stack.layers[: layers - 1], x, stack.context, stack.sync)
    with stack.context:
        x = stack.layers[layers - 1](x)
    raise ArithmeticError


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["in a layer", "before its end", "after it"])
def test_an_exception_anywhere(where, layers, stack):
    try:
        if where == "in a layer":
            stack.layers[layers - 1].fails = True
            stack.forward()
        elif where == "before its end":
            failing(stack, layers)
        else:
            y = stack.forward(layers)
            raise ArithmeticError
    except ArithmeticError:
        y = None
    stack.layers[layers - 1].fails = False
    del y
    stack.context.offload_synchronizer.forget_step()
    stack.goes_on(alive=True)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_exception_ends_the_step(layers, stack):
    """Without forget_step(), while the graph of the earlier layers is alive."""
    y = stack.forward(layers)
    with pytest.raises(ArithmeticError), stack.context:
        raise ArithmeticError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.goes_on(alive=True)
    stack.layers[0].zero_grad(set_to_none=True)
    y.sum().backward()  # and their saved tensors are there
    assert stack.layers[0].linear.weight.grad is not None


@pytest.mark.parametrize("how", ["forget", "again"])
@pytest.mark.parametrize("layers", [2, 3])
def test_a_retry_while_the_exception_is_alive(layers, how, stack):
    """The graph of the failed forward lives as long as its traceback; the next forward is not part of it."""
    try:
        failing(stack, layers)
    except ArithmeticError:
        if how == "forget":
            stack.context.offload_synchronizer.forget_step()
        else:
            with pytest.warns(RuntimeWarning, match=r"sync_fn: the result of layer .*forget_step\(\)"):
                stack.forward()
            stack.context.offload_synchronizer.forget_step()
        stack.seen.clear()
        y = stack.forward()
        assert stack.seen == list(range(N))
        del y
    stack.goes_on(alive=True)  # the traceback of a refusal may still hold a graph


@pytest.mark.parametrize("backward, layers", [(b, n) for b in (True, False) for n in (1, 2, 3, 4)])
def test_a_loss_that_is_still_alive(layers, backward, stack):
    y = stack.forward(layers)
    loss = y.sum()
    if backward:
        loss.backward()
    if backward or layers == N:
        stack.goes_on(alive=True)
    else:  # an early exit: no call ends this forward
        with pytest.warns(RuntimeWarning, match=rf"sync_fn: the result of layer {layers} .*forget_step\(\)"):
            stack.forward()
        stack.context.offload_synchronizer.forget_step()
        stack.goes_on(alive=True)


@pytest.mark.parametrize("around", [[0, 1, 2, 3], [0], [1, 2], [3]], ids=str)
def test_a_recomputation_starts_no_step(around, stack):
    """A reentrant checkpoint runs context and sync function first without gradients, and then inside of a backward."""
    synchronizer, x = stack.context.offload_synchronizer, stack.x.clone().requires_grad_()
    first, last = around[0], around[-1] + 1
    y = forward(stack.layers[:first], x, stack.context, stack.sync)
    for layer in stack.layers[first:last]:
        layer.context = None
    y = torch.utils.checkpoint.checkpoint(
        lambda y: forward(stack.layers[first:last], y, stack.context, stack.sync), y, use_reentrant=True
    )
    y = forward(stack.layers[last:], y, stack.context, stack.sync)
    assert stack.seen == list(range(N - len(around)))
    steps = list(synchronizer.steps())
    assert len(steps) == (len(around) < N)
    y.backward(torch.ones_like(y))
    assert list(synchronizer.steps()) == steps and not synchronizer.layer_open
    assert_same_bits(x.grad, stack.expected[1])
    for layer in stack.layers:
        layer.context = stack.context
    del y, steps
    stack.goes_on()


def test_a_backward_that_does_not_reach_a_layer(stack):
    """Layers reloaded ahead stay on the device for the part of the backward that reads them."""
    synchronizer, x = stack.context.offload_synchronizer, stack.x.clone().requires_grad_()
    before = forward(stack.layers[:2], x, stack.context, stack.sync)
    y = forward(stack.layers[2:], before, stack.context, stack.sync)
    (gradient,) = torch.autograd.grad(y, before, torch.ones_like(y), retain_graph=True)
    states = [layer.state for layer in list(synchronizer.steps())[-1].layers]
    assert states == ["offload_finished", "reload_started", "not_offloaded", "not_offloaded"]
    before.backward(gradient)
    assert_same_bits(x.grad, stack.expected[1])


@pytest.mark.parametrize("layers", [1, 3])
def test_an_early_exit(layers, stack):
    stack.forward(layers).sum().backward()
    stack.goes_on(alive=True)
    stack.forward(layers)  # it has no backward
    stack.goes_on(alive=True)


@pytest.mark.parametrize("at", range(N))
def test_an_evaluation_in_between(at, stack):
    x = stack.x.clone().requires_grad_()
    y = forward(stack.layers[:at], x, stack.context, stack.sync)
    with torch.no_grad():
        for layer in stack.layers:
            layer.context = None
        forward(stack.layers, stack.x, stack.context, stack.sync)
        for layer in stack.layers:
            layer.context = stack.context
    y = forward(stack.layers[at:], y, stack.context, stack.sync)
    assert stack.seen == list(range(N))
    y.backward(torch.ones_like(y))
    assert_same_bits(x.grad, stack.expected[1])


@pytest.mark.parametrize("at", range(1, N))
def test_a_backward_in_the_middle_of_a_forward(at, stack):
    """1F1B: the backward of microbatch 0 runs while microbatch 2 is between two layers."""
    inputs = [stack.x.clone().requires_grad_() for _ in range(3)]
    waiting = [forward(stack.layers, x, stack.context, stack.sync) for x in inputs[:2]]
    y = forward(stack.layers[:at], inputs[2], stack.context, stack.sync)
    waiting[0].backward(torch.ones_like(waiting[0]))
    y = forward(stack.layers[at:], y, stack.context, stack.sync)
    assert stack.seen == 3 * list(range(N))
    for result in (waiting[1], y):
        result.backward(torch.ones_like(result))
    for x in inputs:
        assert_same_bits(x.grad, stack.expected[1])
    del waiting, y, result
    for layer in stack.layers:
        layer.zero_grad(set_to_none=True)
    stack.goes_on(alive=True)


def test_forwards_that_take_turns(stack):
    inputs = [stack.x.clone().requires_grad_() for _ in range(2)]
    first = forward(stack.layers[:1], inputs[0], stack.context, stack.sync)
    with pytest.warns(RuntimeWarning, match="sync_fn: the result of layer 1 .* two forwards alternate"):
        forward(stack.layers[:1], inputs[1], stack.context, stack.sync)
    del first
    stack.context.offload_synchronizer.forget_step()
    stack.goes_on(alive=True)


def test_two_threads(stack):
    x = stack.x.clone().requires_grad_()
    y = forward(stack.layers[:2], x, stack.context, stack.sync)
    errors = []

    def other():
        try:
            stack.forward()
        except RuntimeError as error:
            errors.append(str(error))

    def run():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    run()
    assert len(errors) == 1 and "thread" in errors[0] and "context for each thread" in errors[0]
    stack.seen[:] = [0, 1]
    y = forward(stack.layers[2:], y, stack.context, stack.sync)
    assert stack.seen == list(range(N))
    y.backward(torch.ones_like(y))
    assert_same_bits(x.grad, stack.expected[1])
    run()  # one after the other is right
    assert len(errors) == 1


def test_contexts_in_each_other(stack):
    """A tensor is reloaded, whichever of the two layers it was offloaded with."""
    inner, inner_sync = te.get_cpu_offload_context(True, 1, 2)
    x = stack.x.clone().requires_grad_()
    y = x
    for pair in (stack.layers[:2], stack.layers[2:]):
        with stack.context:
            y = forward(pair, y, inner, inner_sync)
        y = stack.sync(y)
    y.backward(torch.ones_like(y))
    assert_same_bits(y.detach(), stack.expected[0])
    assert_same_bits(x.grad, stack.expected[1])


def test_copies_of_a_model_share_it(stack):
    holder = torch.nn.Module()
    holder.context, holder.sync = stack.context, stack.sync
    twin = copy.deepcopy(holder)
    assert twin.context is stack.context and copy.copy(stack.context) is stack.context
    assert copy.deepcopy(stack.context.offload_synchronizer) is stack.context.offload_synchronizer
    for thing in (stack.context, stack.context.offload_synchronizer):
        with refused(TypeError, type(thing).__name__, "pickled", "get_cpu_offload_context"):
            pickle.dumps(thing)
    stack.goes_on(alive=True)


def test_start_offload_behind_the_layers_end(stack):
    with stack.context:
        y = stack.sync(stack.layers[0](stack.x.clone().requires_grad_()))
        with refused(RuntimeError, "start_offload", "no layer is open"):
            cpu_offload.start_offload(y)
    del y
    stack.context.offload_synchronizer.forget_step()
    stack.goes_on(alive=True)


def test_a_backward_is_over_once(stack, monkeypatch):
    """Not once for each layer, with any number of steps in flight; a backward inside of another one ends separately,
    and the outer one after it."""
    synchronizer, inputs = stack.context.offload_synchronizer, [stack.x.clone().requires_grad_() for _ in range(3)]
    finish, finished = synchronizer.finish_part_of_bwd, []

    def counted():
        finished.append([layer.state for step in synchronizer.steps() for layer in step.layers])
        finish()

    monkeypatch.setattr(synchronizer, "finish_part_of_bwd", counted)
    first, inner = (forward(stack.layers, x, stack.context, stack.sync) for x in inputs[:2])
    first.backward(torch.ones_like(first), retain_graph=True)
    assert len(finished) == 1 and "reload_started" in finished[0]
    y = forward(stack.layers[:2], inputs[2], stack.context, stack.sync)
    y.register_hook(lambda _: inner.backward(torch.ones_like(inner), retain_graph=True))
    y = forward(stack.layers[2:], y, stack.context, stack.sync)
    y.backward(torch.ones_like(y), retain_graph=True)
    assert len(finished) == 4  # by the outer one, the inner one, and later layers of the outer one
    assert all(layer.state != "reload_started" for step in synchronizer.steps() for layer in step.layers)
    for x in inputs:
        assert_same_bits(x.grad, stack.expected[1])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("made_by", [Doubled.apply, lambda x: x * 2])
def test_a_tensor_that_outlives_steps(made_by, backward, stack, monkeypatch):
    """Each step ends its first layer in this node: it has hooks of the steps in flight, and keeps no others alive."""
    synchronizer, leaf = stack.context.offload_synchronizer, stack.x.clone().requires_grad_()
    bwd_step, reached = synchronizer.bwd_step, []
    monkeypatch.setattr(synchronizer, "bwd_step", lambda n: (reached.append(int(n)), bwd_step(n)))
    kept = made_by(leaf)
    forwards = [torch.nn.Identity(), *stack.layers[1:]]

    def run():
        leaf.grad = None
        reached.clear()
        y = forward(forwards, kept, stack.context, stack.sync)
        if backward:
            y.backward(torch.ones_like(y), retain_graph=True)
            assert reached == [3, 2, 1, 0]
            return leaf.grad.clone()
        return y.detach()

    wanted = run()
    for _ in range(3):
        assert_same_bits(run(), wanted)
        assert len(list(synchronizer.steps())) == 1
    waiting = [forward(forwards, kept, stack.context, stack.sync) for _ in range(2)]
    for y in waiting if backward else ():
        leaf.grad = None
        y.backward(torch.ones_like(y), retain_graph=True)
        assert_same_bits(leaf.grad, wanted)
    assert len(list(synchronizer.steps())) == 2
