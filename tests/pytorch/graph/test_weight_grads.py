# Captured callables and weight gradients: delayed ones, main_grad, static ones on demand.
import collections
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import (
    DELAYING,
    assert_same_step,
    build,
    capture,
    left_by,
    linear,
    mlp,
    split_linear,
    step,
    tokens,
    twins,
)


@pytest.mark.parametrize("family", DELAYING, ids=lambda f: f.__name__)
def test_delayed_weight_gradients(device, family):
    module, eager = twins(family, device, delay_wgrad_compute=True)
    capture(module, device)
    assert module.need_backward_dw()
    hooks = []
    for m in (module, eager):
        m.register_wgrad_accumulation_and_reduce_hooks(lambda m=m: hooks.append(m))
    for seed in range(3):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(left_by(module), left_by(eager))
    assert hooks == [module, eager] * 3


def test_delayed_modules_inside_of_a_captured_one(device):
    modules = [torch.nn.Sequential(build(linear, device, delay_wgrad_compute=True), build(mlp, device))]
    modules.append(copy.deepcopy(modules[0]))
    capture(modules[0], device)
    seen = []
    modules[0][0].register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(1))
    for seed in range(2):
        x = tokens(device)
        assert_same_step(step(modules[0], x, seed), step(modules[1], x, seed))
        modules[0].backward_dw()
        modules[1][0].backward_dw()
        assert_same_step(left_by(modules[0]), left_by(modules[1]))
    assert seen == [1, 1]


@pytest.mark.parametrize("family", [linear, mlp], ids=lambda f: f.__name__)
def test_a_static_gradient_of_the_same_graph_twice(device, family):
    """The second replay of a backward writes where .grad still lies: its values are accumulated, not lost."""
    module, eager = twins(family, device)
    capture(module, device, clone_param_grads_on_return=False, retain_graph_in_backward=True)
    for seed in range(2):
        x = tokens(device)
        for m in (module, eager):
            m.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            y = m(x.clone().requires_grad_())
            y.sum().backward(retain_graph=True)
            (y * 3).sum().backward()
        assert_same_step(left_by(module), left_by(eager))


def test_delayed_weight_gradients_out_of_turn(device):
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    capture(module, device)
    with refused(RuntimeError, "Linear", "backward_dw()"):
        module.backward_dw()
    x = tokens(device)
    step(module, x, 1)
    with refused(RuntimeError, "Linear", "backward_dw()", "'_order'"):
        module(x.clone().requires_grad_())
    module.drop_backward_dw()
    module.eval()
    module(x)
    module.train()
    module(x.clone().requires_grad_())  # a replay, after which an eager run is over
    with refused(RuntimeError, "Linear", "backward_dw()", "no backward delayed"):
        module.backward_dw()
    assert_same_step(step(module, x, 1), step(eager, x, 1))
    for m in (module, eager):
        m.backward_dw()
    assert_same_step(left_by(module), left_by(eager))
    immediate = build(linear, device)
    capture(immediate, device)
    assert not immediate.need_backward_dw()
    immediate.backward_dw()


def test_eager_gradients_that_wait_are_left_alone(device):
    """Delayed gradients of the module, from before the capture and from eager calls."""
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    x = tokens(device)
    for m in (module, eager):
        step(m, x, 1)
    capture(module, device)
    other = tokens(device)
    for m in (module, eager):
        step(m, other, 2)
    module.backward_dw()
    module.reset()
    module.backward_dw()
    for _ in range(2):
        eager.backward_dw()
    assert_same_step(left_by(module), left_by(eager))


@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("protocol", [False, True], ids=["main_grad", "with dummies"])
@pytest.mark.parametrize("family", [linear, split_linear, mlp], ids=lambda f: f.__name__)
def test_main_grad(device, family, protocol, delay):
    module, eager = twins(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for m in (module, eager):
        for p in m.parameters():
            p.main_grad = torch.full_like(p, 0.5)
            if protocol:
                p.grad_added_to_main_grad = False
    capture(module, device)
    assert all(p.main_grad.eq(0.5).all() for p in module.parameters())
    assert not any(getattr(p, "grad_added_to_main_grad", False) for p in module.parameters())
    for seed, first in enumerate((None, False, True, False)):
        x = tokens(device)
        left = []
        for m in (module, eager):
            left.append(step(m, x, seed, is_first_microbatch=first))
            if delay:
                m.backward_dw()
            for p in m.parameters():
                p.seen = getattr(p, "grad_added_to_main_grad", None), p.grad is None
                if p.dim() == 2:
                    p.grad = None  # dummies have no values
                if protocol:
                    p.grad_added_to_main_grad = False
        for (name, p), q in zip(module.named_parameters(), eager.parameters()):
            assert p.seen == q.seen, name
            assert_same_bits(p.main_grad, q.main_grad, name)
            if p.grad is not None:
                assert_same_bits(p.grad, q.grad, name)
        assert_same_bits(left[0]["x.grad"], left[1]["x.grad"])


def test_overwrite_main_grad_may_change_between_replays(device):
    module, eager = twins(linear, device, fuse_wgrad_accumulation=True)
    for m in (module, eager):
        m.weight.main_grad = torch.ones_like(m.weight)
        m.weight.overwrite_main_grad = True
    capture(module, device)
    assert module.weight.overwrite_main_grad and module.weight.main_grad.eq(1).all()
    for seed, overwrite in enumerate((True, False, True)):
        x = tokens(device)
        for m in (module, eager):
            m.weight.overwrite_main_grad = overwrite
            step(m, x, seed)
        assert torch.equal(module.weight.main_grad, eager.weight.main_grad)


def test_another_main_grad_is_refused(device):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight)
    capture(module, device)
    kept, module.weight.main_grad = module.weight.main_grad, torch.zeros_like(module.weight)
    with refused(RuntimeError, "Linear", "main_grad", "capture again"):
        module(tokens(device, grad=True)).sum().backward()
    assert kept.eq(0).all()


def test_static_gradients_on_demand(device):
    module, eager = twins(mlp, device)
    capture(module, device, clone_param_grads_on_return=False)
    for seed in range(2):
        x = tokens(device)
        for m in (module, eager):
            m.zero_grad()
        assert_same_step(step(module, x, seed), step(eager, x, seed))
    aliases = {t.data_ptr() for t in module.forward.record.backward_graph.grad_parameters}
    assert all(p.grad.data_ptr() in aliases for p in module.parameters())


# ---- gradients without a copy ----


def marked_twins(family, device, *, delay):
    """The owner of a marked parameter reads its gradient directly; a delayed one is marked already."""
    modules = twins(family, device, delay_wgrad_compute=delay)
    for p in modules[0].parameters():
        p.skip_backward_post_hook = getattr(p, "skip_backward_post_hook", not delay)
    return modules


def backward_in_order(calls, module, entries, inputs):
    """One step in that order; the gradients of its inputs."""
    waiting, alive, done = collections.deque(), {}, {1: 0, -1: 0}
    for entry in entries:
        if entry not in done:
            calls[waiting.popleft()].backward_dw()
            continue
        m, done[entry] = done[entry], done[entry] + 1
        if entry > 0:
            x = inputs[m].clone().requires_grad_()
            alive[m] = x, calls[m](x)
        else:
            x, y = alive.pop(m)
            y.backward(torch.cos(y.detach() * 7))
            inputs[m] = x.grad
            waiting.append(m)
    return {f"dx {m}": dx for m, dx in enumerate(inputs)}


@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("order", [[1, -1, 1, -1], [1, 1, -1, -1]], ids=["one by one", "two in flight"])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("family", [linear, split_linear, mlp], ids=lambda f: f.__name__)
def test_marked_parameters_get_their_gradients_without_a_copy(device, family, delay, order, reuse):
    """At the same address each time, and right: over microbatches, and with accumulation over steps."""
    entries = [part for entry in order for part in ((-1, -1.5) if delay and entry < 0 else (entry,))]
    module, eager = marked_twins(family, device, delay=delay)
    samples = tuple((tokens(device, grad=True),) for _ in range(2))
    graphed = te.make_graphed_callables((module,), samples, _order=entries, _reuse_graph_input_output_buffers=reuse)
    addresses = collections.defaultdict(set)
    marked = {name for name, p in module.named_parameters() if p.skip_backward_post_hook}
    assert marked
    for seed in range(5):
        inputs, found = [tokens(device) for _ in range(2)], []
        for m, calls in ((module, graphed), (eager, [eager] * 2)):
            found.append(backward_in_order(calls, m, entries, list(inputs)) | left_by(m))
        assert_same_step(*found, f"step {seed}")
        if seed < 2 or seed == 4:  # the third adds to the result of the second, and the fourth to that
            for name, p in module.named_parameters():
                if seed < 2:
                    addresses[name].add(p.grad.data_ptr())
                p.grad = None
            eager.zero_grad()
    assert {name for name, found in addresses.items() if len(found) == 1} >= marked


def test_a_gradient_without_a_copy_is_not_shared(device):
    """Two parameters with one gradient, which is also the incoming one (in a graph: the same memory): an addition to
    one does not change the others."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(tokens(device)) for _ in range(2))

        def forward(self, x):
            return x + self.a + self.b

    module = Sum()
    eager = copy.deepcopy(module)
    for p in module.parameters():
        p.skip_backward_post_hook = True
    capture(module, device)
    for seed in range(3):
        x = tokens(device)
        assert_same_step(step(module, x, seed), step(eager, x, seed))
        for m in (module, eager):
            m.a.grad += 1
        assert_same_step(left_by(module), left_by(eager))
