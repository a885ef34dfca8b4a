# Replays in another order than that of the captures: a backward whose memory may have been overwritten raises an error,
# and a backward with memory of its own raises none.
import copy
import itertools

import pytest
import torch
from support import assert_same_bits, refused
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te

from .cases import HIDDEN, TOKENS, assert_same_step, build, left_by, linear, mlp, step, tokens
from .orders import ORDERS, check, chunks_of, pipelines

WORDS = ("graphed callable 0 (Linear)", "order of the captures", "'_order'", "capture them apart")


def captured(device, order, *, delay=False, **options):
    module = build(linear, device, delay_wgrad_compute=delay)
    count = sum(entry == 1 for entry in order)
    twin = copy.deepcopy(module)
    samples = tuple((tokens(device, grad=True),) for _ in range(count))
    return te.make_graphed_callables((module,), samples, _order=order, **options), module, twin


def is_safe(order, run):
    """Whether between the forward and the end of each microbatch `run` has only steps captured in between."""
    positions, ends, at = {}, {}, {}
    counts = {1: 0, -1: 0}
    for position, entry in enumerate(order):
        positions[entry, counts[entry]] = position
        counts[entry] += 1
    for i, (entry, m) in enumerate(run):
        (at if entry == 1 else ends)[m] = i
    return all(positions[1, m] < positions[what] < positions[-1, m] for m in at for what in run[at[m] + 1 : ends[m]])


RUNS = [
    run
    for run in itertools.permutations([(1, 0), (1, 1), (-1, 0), (-1, 1)])
    if all(run.index((1, m)) < run.index((-1, m)) for m in (0, 1))
]


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
@pytest.mark.parametrize("order", [[1, 1, -1, -1], [1, -1, 1, -1]], ids=str)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_two_microbatches_in_any_order(device, order, run, reuse):
    """Right in the order of the captures, or with one microbatch in flight; otherwise a backward is refused. A later
    step in order is right again."""
    graphed, module, eager = captured(device, order, _reuse_graph_input_output_buffers=reuse)

    def go(run):
        alive = {}
        for entry, m in run:
            if entry == 1:
                x = tokens(device)
                alive[m] = [(own, call(own)) for call in (graphed[m], eager) for own in [x.clone().requires_grad_()]]
            else:
                pairs = alive.pop(m)
                for _, y in pairs:
                    y.square().sum().backward()
                assert_same_bits(pairs[0][0].grad, pairs[1][0].grad)

    if is_safe(order, run):
        go(run)
        assert_same_step(left_by(module), left_by(eager))
    else:
        with refused(RuntimeError, *WORDS, "backward of a call"):
            go(run)
        module.zero_grad(), eager.zero_grad()
    counts = {1: itertools.count(), -1: itertools.count()}
    go([(entry, next(counts[entry])) for entry in order])
    assert_same_step(left_by(module), left_by(eager))


def test_layers_in_another_order(device):
    stack = torch.nn.Sequential(*(build(linear, device) for _ in range(3)))
    eager = copy.deepcopy(stack)
    te.make_graphed_callables(tuple(stack), tuple((tokens(device, grad=True),) for _ in stack))
    x = tokens(device)
    with refused(RuntimeError, *WORDS[1:], "callable 2 (Linear)"):
        stack[0](stack[2](x.clone().requires_grad_())).sum().backward()
    stack.zero_grad()
    for use in (slice(0, 3), slice(0, 2), slice(1, 3), slice(2, 3)):
        assert_same_step(step(stack[use], x, 1), step(eager[use], x, 1))
    for m, twin in zip(reversed(stack), reversed(eager)):  # each separately
        assert_same_step(step(m, x, 2), step(twin, x, 2))


def test_passes_that_were_given_up_are_in_nobodys_way(device):
    """Validation with gradients, or an exception between calls: the next step is right."""
    stack = torch.nn.Sequential(*(build(linear, device) for _ in range(3)))
    eager = copy.deepcopy(stack)
    te.make_graphed_callables(tuple(stack), tuple((tokens(device, grad=True),) for _ in stack))
    x = tokens(device)
    for _ in range(2):
        stack(x.clone().requires_grad_())
        stack[:2](x.clone().requires_grad_())
        with torch.no_grad():
            stack(x)
        assert_same_step(step(stack, x, 1), step(eager, x, 1))
        torch.utils.checkpoint.checkpoint(stack, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
        eager(x.clone().requires_grad_()).sum().backward()
        assert_same_step(left_by(stack), left_by(eager))


def test_delayed_weight_gradients_in_another_order(device):
    """Without entries in the order they may run at any time, but not after calls of another step, nor after a forward
    that was captured before their backward: it may overwrite what they read."""
    graphed, module, eager = captured(device, [1, 1, -1, -1], delay=True)
    results = [[call(tokens(device, grad=True)).sum() for call in calls] for calls in (graphed, [eager, eager])]
    for one in results:
        for y in one:
            y.backward()
    graphed[1].backward_dw(), graphed[0].backward_dw(), eager.backward_dw(), eager.backward_dw()
    assert module.weight.grad is not None
    for g in graphed:
        g(tokens(device, grad=True)).sum().backward()
    with refused(RuntimeError, *WORDS, "backward_dw() of a call"):
        graphed[0].backward_dw()
    graphed[0].drop_backward_dw()
    graphed[1].backward_dw()
    graphed[1](tokens(device, grad=True)).sum().backward()
    graphed[0](tokens(device, grad=True)).sum().backward()
    with refused(RuntimeError, *WORDS, "backward_dw() of a call"):
        graphed[1].backward_dw()
    graphed[1].drop_backward_dw()
    graphed[0].backward_dw()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "behind another pass"])
def test_delayed_weight_gradients_are_eagers_or_refused(device, late):
    """With a module whose backward computes what they read."""
    module = build(mlp, device, delay_wgrad_compute=True)
    eager = copy.deepcopy(module)
    samples = tuple((tokens(device, grad=True),) for _ in range(2))
    graphed = te.make_graphed_callables((module,), samples, _order=[1, 1, -1, -1])
    inputs = [tokens(device) for _ in range(2)]
    for g, x in zip(graphed, inputs):
        assert_same_step(step(module, x, 1, call=g), step(eager, x, 1))
        if not late:
            g.backward_dw(), eager.backward_dw()
            assert_same_step(left_by(module), left_by(eager))
    if late:
        with refused(RuntimeError, "callable 0 (LayerNormMLP)", "backward_dw() of a call"):
            graphed[0].backward_dw()


def test_delayed_weight_gradients_with_entries(device):
    order = [1, 1, -1, -1.5, -1, -1.5]
    graphed, *_ = captured(device, order, delay=True)
    losses = [g(tokens(device, grad=True)).sum() for g in graphed]
    losses[0].backward()
    losses[1].backward()  # before the weight gradients of the first one
    with refused(RuntimeError, *WORDS, "backward_dw() of a call"):
        graphed[0].backward_dw()


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", [name for name in ORDERS if name.startswith("delayed")])
def test_retained_passes_with_delayed_weight_gradients(device, name, layers, reuse):
    """The captured order works: a backward that can run again does not prevent delayed weight gradients."""
    order = ORDERS[name]
    waits = [any(entry == -chunk - 1.5 for entry in order) for chunk in range(chunks_of(order))]
    modules = [build(mlp, device, delay_wgrad_compute=wait) for wait in waits for _ in range(layers)]
    options = {"retain_graph_in_backward": True, "_reuse_graph_input_output_buffers": reuse}
    _, graphed, eager = pipelines(modules, order, layers, device, **options)
    check(graphed, eager, device)


def test_retained_passes_of_several_chunks(device):
    """A forward after a backward overwrites what a second backward of that microbatch would read, but not what its
    weight gradients read."""
    modules = tuple(build(linear, device, delay_wgrad_compute=True) for _ in range(2))
    graphed = te.make_graphed_callables(
        modules,
        tuple((tokens(device, grad=True),) for _ in range(4)),
        _order=[1, 2, -2, 1, -2.5, 2, -1, -1.5, -2, -2.5, -1, -1.5],
        _reuse_graph_input_output_buffers=True,
        retain_graph_in_backward=True,
    )
    twin, x = copy.deepcopy(modules[1]), tokens(device)
    graphed[0](tokens(device, grad=True))
    y, wanted = graphed[2](x.clone().requires_grad_()).sum(), twin(x.clone().requires_grad_()).sum()
    for t in (y, wanted):
        t.backward(retain_graph=True)
    graphed[1](tokens(device, grad=True))
    with refused(RuntimeError, "callable 1 (Linear)", *WORDS[1:], "backward of a call"):
        y.backward()
    graphed[2].backward_dw(), twin.backward_dw()
    assert_same_step(left_by(modules[1]), left_by(twin))


def test_a_retained_pass_ends_by_itself(device):
    """A call without gradients does not hide an overwrite: a microbatch of a later capture into the pool is still
    reported to overwrite the first one."""
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else (0, 4712)
    stacks = [[build(linear, device) for _ in range(count)] for count in (2, 1)]
    for stack in stacks:
        te.make_graphed_callables(
            tuple(stack), tuple((tokens(device, grad=True),) for _ in stack), pool=pool, retain_graph_in_backward=True
        )
    (first, second), (other,) = stacks
    x = tokens(device, grad=True)
    y = first(x).sum()
    second(x)
    with torch.no_grad():
        second(x)
    other(x)
    with refused(RuntimeError, *WORDS):
        y.backward()


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_a_backward_that_runs_again(device, reuse):
    """Its memory is kept until the last capture; shared buffers are not."""
    graphed, module, eager = captured(
        device, [1, -1, 1, -1], retain_graph_in_backward=True, _reuse_graph_input_output_buffers=reuse
    )
    x = torch.randn(*TOKENS, HIDDEN, device=device)
    y, twin = graphed[0](x.clone().requires_grad_()), eager(x.clone().requires_grad_())
    for t in (y, twin):
        t.sum().backward(retain_graph=True)
    graphed[1](x.clone().requires_grad_()).sum().backward()
    eager(x.clone().requires_grad_()).sum().backward()
    if reuse:
        with refused(RuntimeError, *WORDS):
            y.sum().backward()
    else:
        y.sum().backward()
        twin.sum().backward()
        assert_same_step(left_by(module), left_by(eager))


def test_one_pool_for_two_captures(device):
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else (0, 4711)
    modules = [build(linear, device) for _ in range(2)]
    for module in modules:
        te.make_graphed_callables(module, (tokens(device, grad=True),), pool=pool)
    with refused(RuntimeError, *WORDS):
        modules[1](modules[0](tokens(device, grad=True))).sum().backward()
    apart = [build(linear, device) for _ in range(2)]
    eager = copy.deepcopy(apart)
    for module in apart:
        te.make_graphed_callables(module, (tokens(device, grad=True),))
    x = tokens(device)
    for order in ((0, 1), (1, 0)):
        got, want = (step(torch.nn.Sequential(*(m[i] for i in order)), x, 1) for m in (apart, eager))
        assert_same_step(got, want)


@pytest.mark.parametrize("reuse", [False, True], ids=["own buffers", "shared buffers"])
@pytest.mark.parametrize("layers", [1, 2])
def test_results_that_a_checkpoint_around_an_earlier_pass_overwrites(device, layers, reuse):
    """Two microbatches in flight: the recomputation of the first one runs after the first run of the second one, whose
    results it may overwrite. With torch's checkpoint, which is not detected, a backward that saved these results
    raises; one microbatch after the other is right."""
    modules = [build(mlp, device) for _ in range(layers)]
    eager = copy.deepcopy(modules)
    samples = tuple((tokens(device, grad=True),) for _ in range(2 * layers))
    graphed = te.make_graphed_callables(
        tuple(modules),
        samples,
        _order=[1, 1, -1, -1],
        _num_layers_per_chunk=[layers],
        _reuse_graph_input_output_buffers=reuse,
    )

    def forward(calls, x):
        for call in calls:
            x = checkpoint(call, x, use_reentrant=True)
        return torch.sin(x).sum()  # which saves x

    one, two = (forward(graphed[m * layers :][:layers], tokens(device, grad=True)) for m in range(2))
    one.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        two.backward()
    for m in (*modules, *eager):
        m.zero_grad()
    for m in range(2):
        x = tokens(device)
        found = [x.clone().requires_grad_() for _ in range(2)]
        forward(graphed[m * layers :][:layers], found[0]).backward()
        forward(eager, found[1]).backward()
        assert_same_bits(found[0].grad, found[1].grad)
        for got, want in zip(modules, eager):
            assert_same_step(left_by(got), left_by(want))
