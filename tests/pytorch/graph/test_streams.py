# Replays on a stream of their own: what waits for what, and what overlaps.
import collections

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.graph.backend.cpu import RecordedEvent, RecordedStream
from transformer_engine.pytorch.graph.backend.cuda import CudaGraphs
from transformer_engine.pytorch.graph.recorded.quantization import WeightFlag

from .cases import (
    Recording,
    assert_same_step,
    build,
    capture,
    event_on,
    left_by,
    linear,
    mlp,
    step,
    stream_on,
    tokens,
    twins,
)


def logged():
    log = collections.deque()
    return log, RecordedStream("graph", log)


def test_a_stream_of_its_own_waits_and_is_waited_for():
    """On the CPU backend: every wait, in order. The log of the current stream is that of the process, so the test reads
    its end."""
    module = build(linear, "cpu")
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.record.backend.current_stream()
    main.log.clear()
    y = module(tokens("cpu", grad=True), cuda_graph_stream=stream)
    assert list(log) == [("graph", "waits for", "main")]
    assert list(main.log) == [("main", "waits for", "graph")]
    y.sum().backward()
    assert list(log) == [("graph", "waits for", "main")] * 2
    assert list(main.log) == [("main", "waits for", "graph")] * 2


@pytest.mark.parametrize("backward", [False, True], ids=["forward alone", "backward too"])
def test_an_event_is_waited_for_where_it_is_recorded(backward):
    """If the backward does not record the event again, the current stream waits for its end."""
    module = Recording(build(linear, "cpu"), "cpu", backward=backward)
    capture(module, "cpu")
    (_, stream), main = logged(), module.forward.record.backend.current_stream()
    main.log.clear()
    y = module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event=module.event)
    assert list(main.log) == [("main", "waits for event", module.event)]
    y.sum().backward()
    assert main.log[-1] == (("main", "waits for event", module.event) if backward else ("main", "waits for", "graph"))
    assert len(main.log) == 2


def test_weight_gradients_go_to_the_stream_of_their_forward():
    module = Recording(build(linear, "cpu", delay_wgrad_compute=True), "cpu")
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.record.backend.current_stream()
    module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event=module.event).sum().backward()
    main.log.clear()
    module.backward_dw()
    assert len(log) == 3 and list(main.log) == [("main", "waits for", "graph")]  # it does not record the event


def test_an_event_needs_a_stream(device):
    module = Recording(build(linear, device), device)
    capture(module, device)
    with refused(ValueError, "Recording", "'cuda_graph_event'", "'cuda_graph_stream'"):
        module(tokens(device), cuda_graph_event=module.event)
    with refused(ValueError, "'cuda_graph_event'"):
        own = module.forward.record.backend.current_stream()
        module(tokens(device), cuda_graph_event=module.event, cuda_graph_stream=own)


@pytest.mark.parametrize("kind", ["never recorded", "recorded beside", "of the backward alone", "of another graph"])
def test_an_event_that_the_forward_does_not_record(device, kind):
    """A wait for it would return at once, and results would be read too early."""
    module, other = Recording(build(linear, device), device), event_on(device)
    if kind == "of the backward alone":
        module.event_behind = other
    capture(module, device)
    if kind == "recorded beside":
        other.record()
    if kind == "of another graph":
        another = Recording(build(linear, device), device)
        capture(another, device)
        other = another.event
    x, stream = tokens(device, grad=True), stream_on(device)
    static, turn = (
        module.forward.record.forward_graph.inputs[0].detach().clone(),
        module.forward.record.calls.forward_id,
    )
    for call in (module, torch.no_grad()(module)):
        with refused(ValueError, "Recording", "'cuda_graph_event'", "does not record", "external=True", "whole graph"):
            call(x, cuda_graph_stream=stream, cuda_graph_event=other)
    assert module.forward.record.calls.forward_id == turn
    assert_same_bits(module.forward.record.forward_graph.inputs[0].detach(), static)
    module(x, cuda_graph_stream=stream, cuda_graph_event=module.event).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["in the order of the capture alone", "without a capture"])
def test_an_event_that_is_not_for_the_outside(kind):
    """An event without external=True is part of the capture, and other streams cannot wait for it."""
    event = torch.cuda.Event()
    module = Recording(build(linear, "cuda"), "cuda", backward=False)
    if kind == "in the order of the capture alone":
        module.event = event
    capture(module, "cuda")
    if kind == "without a capture":
        event.record()
    with refused(ValueError, "Recording", "'cuda_graph_event'", "does not record"):
        module(tokens("cuda"), cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=event)


@pytest.mark.gpu
def test_events_of_a_forked_stream_are_found():
    fork, event = torch.cuda.Stream(), torch.cuda.Event(external=True)

    def function(x):
        y = x * 2
        fork.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(fork):
            z = y + 1
            event.record()
        torch.cuda.current_stream().wait_stream(fork)
        return z

    graphed = te.make_graphed_callables(function, (torch.ones(1000, device="cuda"),))
    x = torch.randn(1000, device="cuda")
    assert_same_bits(graphed(x, cuda_graph_stream=torch.cuda.Stream(), cuda_graph_event=event), x * 2 + 1)


@pytest.mark.gpu
def test_a_backward_without_the_event_is_waited_for():
    """Its gradient is read at once; the event of the forward was recorded long before."""
    size = 2048

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.event = torch.cuda.Event(external=True)
            self.weight = torch.nn.Parameter(torch.randn(size, size, device="cuda") / size**0.5)

        def forward(self, x):
            for _ in range(30):
                x = (x @ self.weight).tanh()
            self.event.record()
            return x

    module = Slow()
    graphed = te.make_graphed_callables(module, (torch.zeros(size, size, device="cuda", requires_grad=True),))
    x, stream, found = torch.randn(size, size, device="cuda"), torch.cuda.Stream(), []
    for options in ({}, {"cuda_graph_stream": stream, "cuda_graph_event": module.event}):
        own = x.clone().requires_grad_()
        torch.cuda.synchronize()
        graphed(own, **options).sum().backward()
        found.append(own.grad.clone())  # on the current stream, which has no other wait
        module.weight.grad = None
    assert_same_bits(*found)


def test_the_current_stream_is_that_of_the_graphs_device(monkeypatch):
    device, asked = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    backend = CudaGraphs.__new__(CudaGraphs)
    backend.device = device
    backend.current_stream()
    assert asked == [device]


@pytest.mark.gpu
def test_replay_on_a_stream_equals_eager():
    module, eager = twins(mlp, "cuda", delay_wgrad_compute=True)
    capture(module, "cuda")
    stream = torch.cuda.Stream()
    for seed in range(5):
        x = tokens("cuda")
        got = step(module, x, seed, cuda_graph_stream=stream)
        want = step(eager, x, seed)
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(got, want)
        assert_same_step(left_by(module), left_by(eager))


@pytest.mark.gpu
def test_the_work_after_an_event_overlaps():
    """A captured copy to pinned memory after the event: the current stream continues before it ends, and its values are
    right."""
    size = 64 * 2**20
    event = torch.cuda.Event(external=True)
    host = torch.empty(size, dtype=torch.float32, pin_memory=True)

    def function(x):
        y = x * 2
        event.record()
        host.copy_(y, non_blocking=True)
        return y

    with torch.no_grad():
        graphed = te.make_graphed_callables(function, (torch.zeros(size, device="cuda"),))
    x, stream = torch.full((size,), 3.0, device="cuda"), torch.cuda.Stream()
    for wait in (False, True):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        with torch.no_grad():
            marks[0].record()
            y = graphed(x, cuda_graph_stream=stream, cuda_graph_event=None if wait else event)
            marks[1].record()
            marks[2].record(stream)
        torch.cuda.synchronize()
        until_main, until_tail = (marks[0].elapsed_time(m) for m in marks[1:])
        assert (until_main < 0.5 * until_tail) is not wait
    assert y.eq(6).all() and host.eq(6).all()


def test_the_flag_of_kept_weights_is_written_on_the_graphs_stream(monkeypatch):
    """After the reads at the end of the last replay."""
    module = build(linear, "cpu")
    capture(module, "cpu", enabled=True, recipe=Float8CurrentScaling(), cache_quantized_params=True)
    backend, written = module.forward.record.backend, []
    monkeypatch.setattr(WeightFlag, "set", lambda _, first, weights: written.append((backend.current_stream(), first)))
    _, stream = logged()
    x = tokens("cpu", grad=True)
    module(x, is_first_microbatch=True, cuda_graph_stream=stream).sum().backward()
    module(x, is_first_microbatch=False)
    assert written == [(stream, True), (backend.current_stream(), False)] and stream is not backend.current_stream()


def test_the_callers_event_where_the_forward_writes_to_an_argument():
    """The values that it wrote are copied to the caller's tensor after the whole graph."""

    event = RecordedEvent()

    def function(x):
        y = x.add_(1) * 2
        event.record()
        return y

    graphed = te.make_graphed_callables(function, (tokens("cpu"),))
    (_, stream), main = logged(), graphed.record.backend.current_stream()
    main.log.clear()
    x = tokens("cpu")
    want = x + 1
    graphed(x, cuda_graph_stream=stream, cuda_graph_event=event)
    assert list(main.log) == [("main", "waits for", "graph")]
    assert_same_bits(x, want)
