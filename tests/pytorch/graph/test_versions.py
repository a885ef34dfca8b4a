# Tensors that replays write to without torch's counting it: autograd has to detect, as in eager, that a saved tensor
# was overwritten. On a CPU the recorder's work would be counted by torch itself, so these tests run it uncounted.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.backend.cpu import RecordedGraph

from .cases import HIDDEN, assert_same_step, build, capture, linear, step, tokens

CHANGED = "modified by an inplace operation"


def tensors_of(graph):
    """All tensors that its function may write: static tensors, arguments, parameters, buffers, main_grads."""
    work = graph.func.__self__
    held = [*work.inputs, *work.module.parameters(), *work.module.buffers()]
    held += [p.main_grad for p in work.module.parameters() if hasattr(p, "main_grad")]
    return tuple(t for t in (*graph.static, *held) if t is not None and not t.is_inference())


@pytest.fixture
def uncounted(device, monkeypatch):
    if device == "cuda":
        return
    replay = RecordedGraph.replay

    def silently(self):
        with torch.autograd._unsafe_preserve_version_counter(tensors_of(self)):
            replay(self)

    monkeypatch.setattr(RecordedGraph, "replay", silently)


pytestmark = pytest.mark.usefixtures("uncounted")


class Module(torch.nn.Module):
    """Counts its calls in a buffer, scales it in its backward, and changes a frozen parameter."""

    def __init__(self, device):
        super().__init__()
        self.inner = build(linear, device)
        self.register_buffer("calls", torch.zeros((), device=device))
        self.register_buffer("backwards", torch.zeros((), device=device))
        self.register_buffer("still", torch.ones((), device=device))
        self.mean = torch.nn.Parameter(torch.zeros(HIDDEN, device=device), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.mean((0, 1)), 0.1)
        return Counted.apply(self.inner(x), self) * self.still


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.module.backwards.add_(1)
        return dy.clone(), None


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_result_that_autograd_saved(device, grad):
    """A second call overwrites what an operation after the first one saved for its backward."""
    module = build(linear, device)
    if not grad:
        module.requires_grad_(False)
    te.make_graphed_callables(module, (tokens(device, grad=grad),))
    weight = torch.randn(HIDDEN, HIDDEN, device=device, requires_grad=True)
    first = module(tokens(device, grad=grad)) @ weight
    first.sum().backward()  # before the next call it works
    first, second = (module(tokens(device, grad=grad)) @ weight for _ in range(2))
    with pytest.raises(RuntimeError, match=CHANGED):
        (first.sum() + second.sum()).backward()


def test_each_replay_counts_what_it_writes_to(device):
    module = Module(device)
    graphed = capture(module, device).forward

    def versions():
        names = ("calls", "backwards", "still", "mean")
        found = {name: getattr(module, name)._version for name in names} | {"weight": module.inner.weight._version}
        return found | {"result": graphed.record.forward_graph.outputs[0]._version}

    def counted(before):
        return {name for name, version in versions().items() if version > before[name]}

    for _ in range(2):
        before = versions()
        y = module(tokens(device, grad=True))
        assert counted(before) == {"calls", "mean", "result"}
        before = versions()
        y.sum().backward()
        assert counted(before) == {"backwards"}
        before = versions()
        with torch.no_grad():
            module(tokens(device, grad=True))
        assert counted(before) == {"calls", "mean", "result"}


def test_buffers_and_parameters_that_autograd_saved(device):
    for name in ("calls", "mean"):
        module = Module(device)
        capture(module, device)
        x = tokens(device, grad=True)
        y = x * getattr(module, name)
        module(tokens(device, grad=True))
        with pytest.raises(RuntimeError, match=CHANGED):
            y.sum().backward()
    y = x * module.still
    module(tokens(device, grad=True)).sum().backward()
    y.sum().backward()


def test_an_argument_that_the_forward_writes_to(device):
    """The static input itself, passed as an argument, and any other one."""

    class Adding(torch.nn.Module):
        def forward(self, x):
            return x.add_(1) * 2

    sample, weight = tokens(device), torch.randn(HIDDEN, HIDDEN, device=device, requires_grad=True)
    graphed = te.make_graphed_callables(Adding(), (sample,))
    for x in (sample, tokens(device)):
        y = x @ weight
        graphed(x)
        with pytest.raises(RuntimeError, match=CHANGED):
            y.sum().backward()


def test_what_comes_back_as_it_was_is_not_written_to(device):
    """A parameter, a buffer, or a view of one as a result."""

    class Returning(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(linear, device)
            self.inner.requires_grad_(False)
            self.register_buffer("table", torch.randn(HIDDEN, device=device))

        def forward(self, x):
            return self.inner(x), self.inner.bias, self.table[4:]

    module = Returning()
    te.make_graphed_callables(module, (tokens(device),))
    weight = torch.randn(HIDDEN, device=device, requires_grad=True)
    y = weight * module.inner.bias * module.table
    before = module.inner.bias._version, module.table._version
    module(tokens(device))
    assert (module.inner.bias._version, module.table._version) == before
    y.sum().backward()


def test_main_grad_and_static_gradients(device):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    eager = copy.deepcopy(module)
    for m in (module, eager):
        m.weight.main_grad = torch.zeros_like(m.weight)
    capture(module, device, clone_param_grads_on_return=False)
    main_grad = module.weight.main_grad
    for seed in range(2):
        before = main_grad._version, None if module.bias.grad is None else module.bias.grad._version
        kept = None if module.bias.grad is None else module.bias.grad.detach()
        module.bias.grad = eager.bias.grad = None
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        assert main_grad._version > before[0]
        assert kept is None or kept._version > before[1]


@pytest.mark.parametrize("clone", [True, False])
def test_delayed_weight_gradients(device, clone):
    module = build(linear, device, delay_wgrad_compute=True)
    for p in module.parameters():
        p.skip_backward_post_hook = not clone  # gradients of marked parameters are returned without a copy
    capture(module, device)
    kept = []
    for _ in range(2):
        module.weight.grad = module.bias.grad = None
        module(tokens(device, grad=True)).sum().backward()
        module.backward_dw()
        kept.append((module.weight.grad, module.weight.grad._version))
    assert (kept[0][0]._version > kept[0][1]) is not clone
    fused = build(linear, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.zeros_like(fused.weight)
    capture(fused, device)
    fused(tokens(device, grad=True)).sum().backward()
    before = fused.weight.main_grad._version
    fused.backward_dw()
    assert fused.weight.main_grad._version > before


def test_a_static_input_between_a_call_and_its_backward(device):
    """torch counts the copy into it; a call with the static input itself does not write it."""
    sample, weight = tokens(device), torch.randn(HIDDEN, HIDDEN, device=device, requires_grad=True)
    graphed = te.make_graphed_callables(build(linear, device).requires_grad_(False), (sample,))
    y = sample @ weight
    before = sample._version
    graphed(sample)
    assert sample._version == before
    y.sum().backward()
    y = sample @ weight
    other = tokens(device)
    graphed(other)
    assert_same_bits(sample, other)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


def test_results_of_inference_mode_are_not_counted(device):
    with torch.inference_mode():
        module = build(linear, device).requires_grad_(False)
        eager = copy.deepcopy(module)
        te.make_graphed_callables(module, (tokens(device),))
        x = tokens(device)
        y = module(x)
        assert y.is_inference()
        assert_same_bits(y, eager(x))


def test_parameters_and_buffers_that_the_backward_reads(device):
    """Written between a call and its backward: the graph would read the new values."""
    module = Module(device)
    capture(module, device)
    for name in ("inner.weight", "still"):
        y = module(tokens(device, grad=True)).sum()
        with torch.no_grad():
            module.get_parameter(name).mul_(2) if name == "inner.weight" else module.get_buffer(name).mul_(2)
        with refused(RuntimeError, "graphed callable 0 (Module)", repr(name), "between the call and its backward"):
            y.backward()
    y = module(tokens(device, grad=True)).sum()
    with torch.no_grad():
        module.inner.bias.add_(1)  # no backward reads it
    y.backward()
