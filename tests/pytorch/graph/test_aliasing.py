# Memory that a call's arguments, results and gradients share: with the static tensors, with each other; and what is
# written in place, by a captured function or by its caller.

import copy
import gc

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.memory.buffers import (
    clone_overlapping_sources,
    copy_into_static,
    overlap_range_of,
)

from .cases import FAMILIES, HIDDEN, assert_same_step, capture, left_by, tokens, twins

OP = "make_graphed_callables"


def mixed(a, b, c):
    return a * 2 + b, b * 3 - c, a + c * 5


def arguments(device, count=3, *, grad=True):
    return [torch.randn(4, 8, device=device).requires_grad_(grad) for _ in range(count)]


def clones(tensors):
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


# ---- arguments ----


@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0), (2, 0, 1), (0, 0, 0), (2, 2, 1), (0, 2, 1)])
@pytest.mark.parametrize("stream", [False, True], ids=["current stream", "its own"])
def test_static_inputs_in_other_places(device, order, stream):
    """The samples are the static inputs."""
    samples = arguments(device, grad=False)
    graphed = te.make_graphed_callables(mixed, tuple(samples))
    options = {"cuda_graph_stream": torch.cuda.Stream()} if stream and device == "cuda" else {}
    for _ in range(3):
        given = [samples[i] for i in order]
        want = mixed(*clones(given))
        for got, wanted in zip(graphed(*given, **options), want):
            assert_same_bits(got, wanted)


def test_views_across_static_inputs(device):
    """Arguments in the memory around a static input, shifted by rows: over itself, and over the next static input."""
    memory = torch.randn(12, 8, device=device)
    graphed = te.make_graphed_callables(
        lambda a, b: (a * 2 + b, a - b), (memory[2:6], torch.randn(4, 8, device=device))
    )
    other = graphed.record.forward_graph.inputs[1]
    for shift in (0, 1, 2, 3, 4, 5, 6, 8):
        memory.copy_(torch.randn(12, 8))
        a, b = memory[shift : shift + 4], torch.randn(4, 8, device=device)
        for x, y in ((a, b), (b, a), (a, memory[2:6]), (other, a)):
            want = [t.clone() for t in (x * 2 + y, x - y)]
            for got, wanted in zip(graphed(x, y), want):
                assert_same_bits(got, wanted)


def test_results_that_come_back_as_arguments(device):
    """One argument is a view of a static input, so copies of the others would overwrite it."""

    def turned(a, b, c):
        return b.view(-1).view(4, 8), c * 1, a.t().t()

    graphed = te.make_graphed_callables(turned, tuple(arguments(device, grad=False)))
    given = arguments(device, grad=False)
    want = clones(given)
    for _ in range(5):
        given, want = graphed(*given), [t.clone() for t in turned(*want)]
        for got, wanted in zip(given, want):
            assert_same_bits(got, wanted)


def test_in_a_backward_too(device):
    """A gradient that is a view of the static gradient of another result."""

    def turned(a, b):
        return b.view(-1), a.view(-1)

    samples = arguments(device, 2)
    graphed = te.make_graphed_callables(turned, tuple(samples), retain_graph_in_backward=True)
    sources = arguments(device, 2)
    inner = [s * 1 for s in sources]  # not leaves: their gradients are the static ones
    results = graphed(*inner)
    grads = tuple(torch.randn(32, device=device) for _ in results)
    want = grads
    for _ in range(4):
        grads = [g.view(-1) for g in torch.autograd.grad(results, inner, grads, retain_graph=True)]
        want = want[::-1]
        for got, wanted in zip(grads, want):
            assert_same_bits(got, wanted)


def test_moves_are_as_if_all_were_read_first():
    memory = torch.arange(40.0)
    static = [memory[0:10], memory[10:20], None, memory[20:30], torch.ones(3)]
    near, addresses = overlap_range_of(static), [0 if t is None else t.data_ptr() for t in static]
    given = [memory[5:15], memory[0:10], memory[0:3], memory[20:30], None]
    want = [t.clone() for t in given[:2]] + [memory[20:30].clone(), torch.zeros(3)]
    copy_into_static(static, addresses, near, given)
    for t, wanted in zip([t for t in static if t is not None], want):
        assert_same_bits(t, wanted)
    source = torch.ones(10)
    assert clone_overlapping_sources([(memory[0:10], source)])[0][1] is source
    assert overlap_range_of([]) == overlap_range_of([None, torch.ones(0)]) == (0, 0)


# ---- a function that writes to its arguments ----


def accumulating(x, total, *, count):
    total += x.detach().sum(0)
    count[1:].add_(1)
    return x * total


@pytest.mark.parametrize("warmups", [0, 3])
def test_a_function_that_writes_to_its_arguments(device, warmups):
    """They are unchanged after the capture; each call writes what eager writes, at any address of an argument."""
    x, total, count = tokens(device, grad=True), torch.ones(2, HIDDEN, device=device), torch.zeros(2, device=device)
    before = clones([x, total, count])
    graphed = te.make_graphed_callables(
        accumulating, (x, total), sample_kwargs={"count": count}, num_warmup_iters=warmups
    )
    for got, wanted in zip((x, total, count), before):
        assert_same_bits(got, wanted)
    elsewhere = clones([total, count])
    for options in ({}, {"cuda_graph_stream": torch.cuda.Stream()} if device == "cuda" else {}):
        for own_total, own_count in ((total, count), elsewhere):
            given = tokens(device, grad=True)
            twin, want = clones([given])[0], clones([own_total, own_count])
            y = graphed(given, own_total, count=own_count, **options)
            wanted = accumulating(twin, want[0], count=want[1])
            y.sum().backward()
            wanted.sum().backward()
            for got, w in zip((y, own_total, own_count, given.grad), (wanted, *want, twin.grad)):
                assert_same_bits(got, w)


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_a_module_that_writes_to_its_arguments_in_an_order(device, reuse):
    class Adding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, device=device))

        def forward(self, x, total):
            total += x.detach().sum(0)
            return x * self.weight * total

    module, eager = Adding(), Adding()
    samples = tuple((torch.randn(4, 8, device=device).requires_grad_(), torch.randn(8, device=device)) for _ in "123")
    before = [t.detach().clone() for pair in samples for t in pair]
    graphed = te.make_graphed_callables(
        (module,), samples, _order=[1, 1, -1, 1, -1, -1], _reuse_graph_input_output_buffers=reuse
    )
    for got, wanted in zip([t for pair in samples for t in pair], before):
        assert_same_bits(got, wanted)
    for _ in range(2):
        alive, given = [], [torch.randn(4, 8, device=device) for _ in "123"]
        for microbatch, goes_back in ((0, None), (1, 0), (2, 1), (None, 2)):
            if microbatch is not None:
                inputs = [given[microbatch].clone().requires_grad_() for _ in "12"]
                totals = [torch.full((8,), 0.5, device=device) for _ in "12"]
                results = [call(x, t) for call, x, t in zip((graphed[microbatch], eager), inputs, totals)]
                assert_same_bits(*results), assert_same_bits(*totals)
                alive.append((inputs, results))
            if goes_back is not None:
                inputs, results = alive[goes_back]
                for y in results:
                    y.sum().backward()
                assert_same_bits(inputs[0].grad, inputs[1].grad)
    assert_same_bits(module.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("warmups", [0, 2])
def test_arguments_are_as_before_when_a_capture_fails(device, warmups):
    class Fault(Exception):
        pass

    calls = []

    def function(x, total):
        total += x
        calls.append(1)
        if len(calls) > warmups:
            raise Fault
        return total * 2

    x, total = arguments(device, 2, grad=False)
    before = total.clone()
    with pytest.raises(Fault):
        te.make_graphed_callables(function, (x, total), num_warmup_iters=warmups)
    assert_same_bits(total, before)


def test_writing_to_an_argument_that_requires_a_gradient(device):
    def function(x):
        x.mul_(2)
        return x * 3

    x = tokens(device, grad=True)
    before = x.detach().clone()
    with refused(ValueError, OP, "callable 0 (function)", "in place", "copy", "requires_grad=False"):
        te.make_graphed_callables(function, (x,))
    assert_same_bits(x.detach(), before)


def test_arguments_of_inference_mode(device):
    with torch.inference_mode():
        x, total = arguments(device, 2, grad=False)
        before = total.clone()
        graphed = te.make_graphed_callables(lambda x, total: total.add_(x) * 2, (x, total))
        assert_same_bits(total, before)
        assert_same_bits(graphed(x, total), (before + x) * 2)


# ---- a caller that writes to results and arguments ----


def halves(x):
    y = x * 2
    return y[..., : HIDDEN // 2], y[..., HIDDEN // 2 :]


def and_its_row(x):
    y = x * 2
    return y, y[1:2]


def and_its_square(x):
    y = x * 2
    return y * y, y


# The forward, the result that is written to, and whether eager's backward continues from there as that of the graph.
WRITES = {
    "product": (lambda x: x * 2, 0, True),
    "exp": (torch.exp, 0, False),
    "softmax": (lambda x: x.softmax(-1), 0, False),
    "relu in place": (lambda x: (x * 2).relu_(), 0, False),
    "view": (lambda x: (x * 2).view(-1), 0, True),
    "half": (halves, 1, True),
    "first of two": (and_its_square, 0, True),
    "read by the first": (and_its_square, 1, False),
    "with its row": (and_its_row, 0, False),
    "a row": (and_its_row, 1, False),
    "the argument": (lambda x: (x.view(-1), x * 2), 0, False),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("warmups", [0, 3])
def test_a_result_that_is_written_to(device, name, warmups):
    """The gradients of eager if the backward reads none of it; otherwise an error, as in eager, that names the
    result."""
    function, which, fine = WRITES[name]
    graphed = te.make_graphed_callables(function, (tokens(device, grad=True),), num_warmup_iters=warmups)
    for write in (False, True):
        x = tokens(device, grad=True)
        twin = x.detach().clone().requires_grad_()
        results = graphed(x * 1), function(twin * 1)
        both = [list(r) if isinstance(r, tuple) else [r] for r in results]
        if write and not fine:
            both[0][which].mul_(3)
            named = "result 0" if name == "a row" and device == "cuda" else f"result {which}"  # one memory, as in eager
            with refused(RuntimeError, "graphed callable 0", named, "in place", "copy"):
                sum(t.sum() for t in both[0]).backward()
            continue
        for leaves in both:
            if write:
                leaves[which].mul_(3)
            sum(t.square().sum() for t in leaves).backward()
        assert_same_bits(x.grad, twin.grad)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_a_modules_result_may_be_added_to(device, family):
    """Like a residual; no module reads its result again."""
    module, eager = twins(family, device)
    capture(module, device)
    x = tokens(device)
    left = []
    for m in (module, eager):
        torch.manual_seed(3)
        own = x.clone().requires_grad_()
        y = m(own)
        y += x
        y.square().sum().backward()
        left.append({"x": own.grad, **left_by(m)})
    assert_same_step(*left)


@pytest.mark.parametrize("stream", [False, True], ids=["current stream", "its own"])
@pytest.mark.parametrize("warmups", [0, 3])
def test_a_static_input_that_is_written_to_before_the_backward(device, stream, warmups):
    sample, other = tokens(device, grad=True), tokens(device)
    options = {"cuda_graph_stream": torch.cuda.Stream()} if stream and device == "cuda" else {}
    graphed = te.make_graphed_callables(lambda x: x.square(), (sample,), num_warmup_iters=warmups)
    for given in (sample, other.clone().requires_grad_()):
        y = graphed(given, **options)
        with torch.no_grad():
            given.copy_(other)
        if given is sample:
            with refused(RuntimeError, "graphed callable 0", "argument 0", "in place", "copy"):
                y.sum().backward()
    graphed = te.make_graphed_callables(lambda x: x * 2, (sample,))  # its backward reads no tensor
    y = graphed(sample)
    with torch.no_grad():
        sample.copy_(other)
    y.sum().backward()
    assert sample.grad.eq(2).all()


def test_torch_func_inside(device):
    def function(x):
        return torch.func.vmap(torch.func.grad(lambda t: t.square().sum()))(x)

    sample = (torch.ones(3, 4, device=device),)
    with refused(RuntimeError, "make_graphed_callables", "torch.func", "'num_warmup_iters'"):
        te.make_graphed_callables(function, sample, num_warmup_iters=0)
    graphed = te.make_graphed_callables(function, sample)
    x = torch.randn(3, 4, device=device)
    assert_same_bits(graphed(x), x * 2)


# ---- samples in memory that is in use ----


def test_a_sample_of_two_captures(device):
    """Each has separate static inputs: the second one is called between the call of the first one and its backward."""
    shared = torch.randn(4, 8, device=device)
    functions = [torch.nn.Linear(8, 8, device=device) for _ in range(3)]
    twins_of = [copy.deepcopy(f) for f in functions]
    samples = [(shared,), (shared,), (shared[1:3],)]
    graphed = [te.make_graphed_callables(f, s) for f, s in zip(functions, samples)]
    given = [torch.randn(4, 8, device=device), torch.randn(4, 8, device=device), torch.randn(2, 8, device=device)]
    results = [g(x) for g, x in zip(graphed, given)]
    for result, function, twin, x in reversed(list(zip(results, functions, twins_of, given))):
        result.backward(torch.ones_like(result))  # that of sum() has zero strides, for which cuBLAS uses another GEMM
        twin(x).backward(torch.ones_like(result))
        assert_same_bits(function.weight.grad, twin.weight.grad)


def test_a_sample_is_free_again(device):
    """After a reset, or when the captured callable is freed, the sample is the static input itself again."""
    x = torch.randn(4, 8, device=device)
    graphed = te.make_graphed_callables(lambda x: x * 2, (x,))
    assert graphed.record.forward_graph.inputs[0].data_ptr() == x.data_ptr()
    second = te.make_graphed_callables(lambda x: x * 2, (x,))
    assert second.record.forward_graph.inputs[0].data_ptr() != x.data_ptr()
    graphed.reset()
    third = te.make_graphed_callables(lambda x: x * 2, (x,))
    assert third.record.forward_graph.inputs[0].data_ptr() == x.data_ptr()
    del graphed, third
    gc.collect()
    fourth = te.make_graphed_callables(lambda x: x * 2, (x,))
    assert fourth.record.forward_graph.inputs[0].data_ptr() == x.data_ptr()


class Scaled(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8, device=device))
        self.register_buffer("factor", torch.randn(4, 8, device=device))

    def forward(self, x, factor):
        return x * self.weight + factor * self.factor


@pytest.mark.parametrize("name", ["weight", "factor"])
def test_a_sample_in_the_memory_of_the_module(device, name):
    module = Scaled(device)
    twin = copy.deepcopy(module)
    te.make_graphed_callables(module, (torch.randn(4, 8, device=device), getattr(module, name).detach()))
    for _ in range(2):
        given = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
        assert_same_bits(module(*given), twin(*given))
        assert_same_bits(getattr(module, name), getattr(twin, name))


def test_the_copy_of_a_sample_has_its_strides(device):
    """view() in a captured callable depends on them."""
    base = torch.randn(6, 10, device=device)
    kept = te.make_graphed_callables(lambda x: x * 2, (base[:, :8],))
    graphed = te.make_graphed_callables(lambda x: x.as_strided((4, 8), (10, 1)) + 1, (base[:4, :8],))
    assert graphed.record.forward_graph.inputs[0].data_ptr() != kept.record.forward_graph.inputs[0].data_ptr()
    assert graphed.record.forward_graph.inputs[0].stride() == (10, 1)
    given = torch.randn(4, 10, device=device)[:, :8]
    assert_same_bits(graphed(given), given + 1)
