# Captured modules whose class has its own __call__, as frameworks write it: the capture goes through it, and a call
# reaches the replay once.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing

from .cases import HIDDEN, assert_same_step, build, leaves_of, left_by, linear, step, tokens


class Part(torch.nn.Module):
    """Only the first half of a layer is captured; the subclass decides it."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = build(linear, device), build(linear, device)
        self.captured = []

    def half(self, x):
        return (torch.tanh(self.first(x)),)

    def forward(self, x):
        return self.second(*self.half(x))


class ByFlag(Part):
    capturing = False

    def __call__(self, x):
        return self.half(x) if self.capturing else super().__call__(x)


class ByState(Part):
    """Its __call__ reads an attribute before it tests is_graph_capturing()."""

    def __call__(self, x):
        if self.captured:
            return self.second(*self.captured[0](x))
        return self.half(x) if is_graph_capturing() else super().__call__(x)


class ByCapture(Part):
    def __call__(self, *args, **kwargs):
        if is_graph_capturing():
            return self.half(*args, **kwargs)
        if self.captured and self.training:
            return self.second(*self.captured[0](*args, **kwargs))
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("kind", [ByFlag, ByState, ByCapture], ids=lambda kind: kind.__name__)
def test_a_part_of_a_layer(device, kind):
    module = kind(device)
    eager = copy.deepcopy(module)
    module.capturing = True
    graphed = te.make_graphed_callables((module,), ((tokens(device, grad=True),),), _order=[1, -1])
    module.capturing = False
    for put in (lambda: module.captured.append(graphed[0]), lambda: setattr(module, "captured", [graphed[0]])):
        module.captured = []
        put()
        for seed in range(2):
            x = tokens(device)

            def call(x):
                return module.second(*graphed[0](x)) if kind is ByFlag else module(x)

            assert_same_step(step(module, x, seed, call=call), step(eager, x, seed))
    assert graphed[0].record.calls.forward_id == 4


def test_parameters_that_are_left_to_eager_are_not_come_by(device):
    """Only those gradient accumulators run that run in eager; an input still has to be used."""
    module = ByCapture(device)
    graphed = te.make_graphed_callables((module,), ((tokens(device, grad=True),),), _order=[1, -1])
    nodes = {id(p): torch.autograd.graph.get_gradient_edge(p).node for p in module.parameters()}
    ran = []
    for key, p in module.named_parameters():
        nodes[id(p)].register_hook(lambda *_, key=key: ran.append(key))
    graphed[0](tokens(device, grad=True))[0].sum().backward()
    assert sorted(ran) == ["first.bias", "first.weight"] and module.second.weight.grad is None

    class Ignoring(ByCapture):
        def half(self, x):
            return super().half(x.detach())

    with refused(RuntimeError, "argument 0", "Ignoring", "allow_unused_input=True"):
        te.make_graphed_callables((Ignoring(device),), ((tokens(device, grad=True),),), _order=[1, -1])


def test_a_part_of_a_layer_without_its_graph(device):
    """In the other mode the captured callable still replaces that part; a class that calls it again gets an error."""
    for kind in (ByCapture, ByState):
        module = kind(device)
        eager = copy.deepcopy(module)
        sample = ((tokens(device, grad=True),),)
        graphed = te.make_graphed_callables((module,), sample, _order=[1, -1])
        module.captured = [graphed[0]]
        module.eval(), eager.eval()
        x = tokens(device, grad=True)
        with pytest.warns(UserWarning, match="without the graph"):
            if kind is ByCapture:
                assert_same_bits(module.second(*graphed[0](x)), eager(x))
                assert_same_bits(module(x), eager(x))
            else:
                with refused(RuntimeError, "ByState", "__call__", "is_graph_capturing()"):
                    module(x)
        assert graphed[0].record.calls.forward_id == 0


class Around(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.inner = build(linear, device)

    def forward(self, x):
        return self.inner(x)

    def __call__(self, x, scale=2.0):
        return torch.sin(super().__call__(x * scale)), x + 1


class Instead(Around):
    """No call reaches forward."""

    def __call__(self, x):
        return self.inner(torch.sin(x))


class WithoutForward(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.inner = build(linear, device)

    def __call__(self, x):
        return self.inner(torch.sin(x))


class Hooking(Around):
    """Its __call__ registers a hook for the duration of a call."""

    def __call__(self, x):
        handle = self.register_forward_hook(lambda module, args, y: y * 3)
        try:
            return torch.nn.Module.__call__(self, x)
        finally:
            handle.remove()


class Listed(Around):
    """Its subclasses are registered by a name that they have to pass."""

    names = ()

    def __init_subclass__(cls, *, name, **kwargs):
        super().__init_subclass__(**kwargs)
        Listed.names += (name,)


class Own(Listed, name="own"):
    def __call__(self, x):
        return super().__call__(x, scale=0.5)


class OurOwn(te.Linear):
    def __init__(self, device):
        super().__init__(HIDDEN, HIDDEN, device=device)

    def __call__(self, x, is_first_microbatch=None):
        return super().__call__(torch.sin(x), is_first_microbatch=is_first_microbatch) + 1


OWN = [Around, Instead, WithoutForward, Hooking, Own, OurOwn]
every_class = pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)


@every_class
def test_a_call_comes_to_the_replay_once(device, kind):
    module = kind(device)
    eager = copy.deepcopy(module)
    before = set(vars(module))
    assert te.make_graphed_callables(module, (tokens(device, grad=True),)) is module
    graphed = module.forward
    for seed in range(3):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        assert graphed.record.calls.forward_id == seed + 1
    assert isinstance(module, kind) and type(module).__name__ == kind.__name__
    assert Listed.names == ("own",)
    with refused(RuntimeError, kind.__name__, "reset()"):
        copy.deepcopy(module)
    module.reset()
    assert type(module) is kind and set(vars(module)) == before
    x = tokens(device)
    module.zero_grad(), eager.zero_grad()
    assert_same_step(step(module, x, 5), step(eager, x, 5))


@every_class
@pytest.mark.parametrize("hooked", [False, True], ids=["no hooks", "hooks"])
def test_the_other_mode_runs_the_class_once(device, kind, hooked):
    """Without the graph a call runs the __call__ of the class again, with hooks around it, once."""
    module = kind(device)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, grad=True),))
    seen = []
    if hooked:
        module.register_forward_hook(lambda *_: seen.append(1))
    forward = module.forward
    for train in (True, False, False, True):
        module.train(train), eager.train(train)
        x = tokens(device)
        if train:
            got = step(module, x, 1)
        else:
            with pytest.warns(UserWarning, match="without the graph"):
                got = step(module, x, 1)
        assert_same_step(got, step(eager, x, 1))
        assert module.forward is forward
    assert seen == [1, 1, 1, 1] * hooked and forward.record.calls.forward_id == 2


def test_the_other_mode_raises_in_the_class(device):
    """Its exception is raised, and the module is captured as before."""

    class Raising(Around):
        def __call__(self, x):
            if not self.training:
                raise KeyError("mine")
            return super().__call__(x)

    module = Raising(device)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, grad=True),))
    forward, x = module.forward, tokens(device)
    module.eval()
    with pytest.raises(KeyError, match="mine"), pytest.warns(UserWarning, match="without the graph"):
        module(x.requires_grad_())
    module.train()
    assert module.forward is forward
    assert_same_step(step(module, x, 1), step(eager, x, 1))
    assert forward.record.calls.forward_id == 1


def test_the_other_mode_gets_is_first_microbatch(device):
    """Through a __call__ with that argument, or one that passes keywords to a forward with it."""

    class PassingKeywords(te.Linear):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class Naming(te.Linear):
        def __call__(self, x, is_first_microbatch=None):
            return super().__call__(x, is_first_microbatch=is_first_microbatch)

    for kind in (PassingKeywords, Naming):
        module = kind(HIDDEN, HIDDEN, device=device, fuse_wgrad_accumulation=True)
        eager = copy.deepcopy(module)
        for m in (module, eager):
            m.weight.main_grad = torch.ones_like(m.weight)
        te.make_graphed_callables(module, (tokens(device, grad=True),))
        module.eval(), eager.eval()
        x = tokens(device)
        for first in (True, False):
            with pytest.warns(UserWarning, match="without the graph"):
                got = step(module, x, 1, is_first_microbatch=first)
            assert_same_step(got, step(eager, x, 1, is_first_microbatch=first))


def test_attributes_are_those_of_the_capture(device):
    """A graph contains the attributes of the capture; attributes that a replay of the CPU backend sets are removed."""

    class Counting(Around):
        factor, calls = 2.0, 0

        def __call__(self, x):
            self.calls += 1
            return self.inner(x) * self.factor

    module = Counting(device)
    te.make_graphed_callables(module, (tokens(device, grad=True),))
    module.factor, module.later, calls = 5.0, [], module.calls
    x = tokens(device)
    assert_same_bits(leaves_of(module(x.requires_grad_()))[0], module.inner(x) * 2.0)
    assert (module.factor, module.later, module.calls) == (5.0, [], calls)


def fused_part(device, delay):
    module = ByCapture(device)
    for name in ("first", "second"):
        setattr(module, name, build(linear, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay))
        part = getattr(module, name)
        part.weight.main_grad, part.weight.grad_added_to_main_grad = torch.ones_like(part.weight), False
    return module


@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
def test_main_grads_of_eager_parts(device, delay):
    """If the first microbatch replaces main_grads, a replay zeroes those that its own graph adds to; eager has already
    filled the others, whose accumulators are not delayed."""
    module, eager = fused_part(device, delay), fused_part(device, delay)
    eager.load_state_dict(module.state_dict())
    graphed = te.make_graphed_callables((module,), ((tokens(device, grad=True),),), _order=[1, -1])[0]
    seen = {}
    for kind, m in (("graph", module), ("eager", eager)):
        weight, order = m.second.weight, seen.setdefault(kind, [])
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_hook(lambda *_, weight=weight, order=order: order.append(weight.main_grad.clone()))
        m.node = node
    for seed, first in enumerate((True, False, True)):
        x, found = tokens(device), []

        def replayed(x, first=first):
            return module.second(*graphed(x, is_first_microbatch=first), is_first_microbatch=first)

        def plain(x, first=first):
            return eager.second(torch.tanh(eager.first(x, is_first_microbatch=first)), is_first_microbatch=first)

        for m, call in ((module, replayed), (eager, plain)):
            found.append(step(m, x, seed, call=call))
            for owner in (graphed, m.second) if delay and m is module else (m.first, m.second) if delay else ():
                owner.backward_dw()
            found[-1] |= left_by(m)
            m.zero_grad()
        assert_same_step(*found, f"step {seed}")
        for got, want in zip(seen["graph"], seen["eager"], strict=True):
            assert_same_bits(got, want)


def test_what_a_capture_made_is_written_once(device):
    """A caller may set attributes of its own on a captured callable."""
    graphed = te.make_graphed_callables(
        (te.Linear(HIDDEN, HIDDEN, device=device),), ((tokens(device, grad=True),),), _order=[1, -1]
    )
    graphed[0].tag = 3
    assert graphed[0].tag == 3
    with pytest.raises(AttributeError, match="cannot assign to field 'parameters'"):
        graphed[0].record.parameters = []
