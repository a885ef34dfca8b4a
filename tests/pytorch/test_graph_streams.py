# Replays on a stream of their own: what waits for what, and what overlaps. Mutant: leaving out the wait for the graph's
# stream turns these red.
import collections

import pytest
import torch
from graph_cases import (
    assert_same_step,
    build,
    capture,
    left_by,
    linear,
    mlp,
    step,
    tokens,
    twins,
)
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.graph.cuda import CudaGraphs
from transformer_engine.pytorch.graph.quantized import WeightFlag
from transformer_engine.pytorch.graph.recorder import RecordedStream


def logged():
    log = collections.deque()
    return log, RecordedStream("graph", log)


def test_a_stream_of_its_own_waits_and_is_waited_for():
    """On the recorder: every edge, in order. The current stream's own log is that of the process, so it is looked at
    from behind."""
    module = build(linear, "cpu")
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.backend.current_stream()
    main.log.clear()
    y = module(tokens("cpu", grad=True), cuda_graph_stream=stream)
    assert list(log) == [("graph", "waits for", "main")]
    assert list(main.log) == [("main", "waits for", "graph")]
    y.sum().backward()
    assert list(log) == [("graph", "waits for", "main")] * 2
    assert list(main.log) == [("main", "waits for", "graph")] * 2
    main.log.clear()
    module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event="event").sum().backward()
    assert list(main.log) == [("main", "waits for event", "event")] * 2


def test_weight_gradients_go_to_the_stream_of_their_forward():
    module = build(linear, "cpu", delay_wgrad_compute=True)
    capture(module, "cpu")
    log, stream = logged()
    main = module.forward.backend.current_stream()
    module(tokens("cpu", grad=True), cuda_graph_stream=stream, cuda_graph_event="event").sum().backward()
    main.log.clear()
    module.backward_dw()
    assert len(log) == 3 and list(main.log) == [("main", "waits for", "graph")]  # nothing in it records the event


def test_an_event_needs_a_stream(device):
    module = build(linear, device)
    capture(module, device)
    event = torch.cuda.Event(external=True) if device == "cuda" else object()
    with refused(ValueError, "Linear", "'cuda_graph_event'", "'cuda_graph_stream'"):
        module(tokens(device), cuda_graph_event=event)
    with refused(ValueError, "'cuda_graph_event'"):
        own = module.forward.backend.current_stream()
        module(tokens(device), cuda_graph_event=event, cuda_graph_stream=own)


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
def test_the_tail_behind_an_event_overlaps():
    """A captured copy to pinned memory behind the event: the current stream goes on before it is done, and what it
    brings is right."""
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
    """Behind what the tail of the last replay may still read."""
    module = build(linear, "cpu")
    capture(module, "cpu", enabled=True, recipe=Float8CurrentScaling(), cache_quantized_params=True)
    backend, written = module.forward.backend, []
    monkeypatch.setattr(WeightFlag, "set", lambda _, first: written.append((backend.current_stream(), first)))
    _, stream = logged()
    x = tokens("cpu", grad=True)
    module(x, is_first_microbatch=True, cuda_graph_stream=stream).sum().backward()
    module(x, is_first_microbatch=False)
    assert written == [(stream, True), (backend.current_stream(), False)] and stream is not backend.current_stream()
