# Layers with a stash, captured one by one: what waits for what, by streams that know captures by number, as CUDA does;
# and which replays are refused. On a GPU the captures are real.
import contextlib
import itertools

import pytest
import torch
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.graph.backend import cpu
from transformer_engine.pytorch.graph.backend.cpu import RecordedEvent, RecordedStream
from transformer_engine.pytorch.graph.observers import events_of_capture
from transformer_engine.pytorch.stash import manager

from .cases import LIVE, ROWS, count, given, made, report, same
from .test_graphs import Layer, run

N = 3
POOL = {"device_pages": None, "factor": 2.0, "page_bytes": 128}


class Numbered(_C.StashStreams):
    """A wait for an event of another capture fails, and so does the end of a capture whose copies are not joined.
    calls: those of each capture, by its number."""

    number = 0  # of the current capture

    def __init__(self, device):
        super().__init__(device)
        self.marks, self.unjoined, self.calls = itertools.count(), {}, {}

    def capture(self):
        return self.number

    def note(self, call):
        self.calls.setdefault(self.number, []).append(call)

    def check_own(self, event):
        assert event.capture == self.number, f"capture {self.number} waits for {event.label} of {event.capture}"

    def now(self, label):
        return _C.StashEvent("compute", next(self.marks), label, self.number)

    def run(self, stream, work, label, after):
        for event in after:
            self.check_own(event)
        work(self.current())
        event = _C.StashEvent(stream, next(self.marks), label, self.number)
        self.unjoined[stream] = event.mark
        self.note(label)
        return event

    def wait(self, event):
        self.check_own(event)
        if self.unjoined.get(event.stream) == event.mark:
            del self.unjoined[event.stream]
        self.note(f"wait {event.label}")


@pytest.fixture
def numbered(monkeypatch):
    """A function that sets such streams on a stash; each capture on the CPU has a number."""
    found, numbers = [], itertools.count(1)

    @contextlib.contextmanager
    def counted(recorded):
        (streams,) = found
        streams.number, streams.unjoined = next(numbers), {}
        try:
            with events_of_capture(recorded) as events:
                yield events
            assert not streams.unjoined, f"capture {streams.number} ends before {list(streams.unjoined)} is joined"
        finally:
            streams.number = 0

    def on(stash):
        streams = stash.streams = Numbered(stash.device)
        found.append(streams)
        return streams

    monkeypatch.setattr(cpu, "events_of_capture", counted)
    return on


class Recording(Layer):
    """Records an event after its result, or before it."""

    def __init__(self, stash, number, device, event, early=False):
        super().__init__(stash, number, device)
        self.event, self.early = event, early

    def forward(self, x, counter):
        if self.early:
            self.event.record()
        y = super().forward(x, counter)
        if not self.early:
            self.event.record()
        return y


def twins(stash, device, make=Layer):
    """Layers with the stash, and the same layers without one."""
    layers, plain = [make(stash, i, device) for i in range(N)], [Layer(None, i, device) for i in range(N)]
    for a, b in zip(layers, plain, strict=True):
        b.load_state_dict(a.state_dict())
    return layers, plain


def captured(layers, x, counter, stash):
    """Their callables, after the eager step that makes the pool."""
    stash.reset()
    run(layers, x, counter)
    samples = tuple((x.clone().requires_grad_(), counter.clone()) for _ in layers)
    return te.make_graphed_callables(tuple(layers), samples, _order=[1, -1], _num_layers_per_chunk=[len(layers)])


def replayed(passes, layers, x, counter, **how):
    y = leaf = x.clone().requires_grad_()
    for i, call in enumerate(passes):
        y = call(y, counter, **{key: value[i] for key, value in how.items()})
    y[:LIVE].sum().backward()
    found = [leaf.grad[:LIVE], *(p.grad.clone() for layer in layers for p in layer.parameters())]
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return found


def test_captures_by_number(numbered):
    counter, x = count(LIVE, "cpu"), given("cpu")
    with made("cpu", **POOL) as stash:
        streams = numbered(stash)
        layers, plain = twins(stash, "cpu")
        expected = run(plain, x, counter)
        passes = captured(layers, x, counter, stash)
        calls = [found for number, found in sorted(streams.calls.items()) if number]
        # The last layer's backward is next: it stays. A graph loads for the one after it, and joins its copies.
        assert calls == [
            ["store 0", "wait store 0"],
            ["store 1", "wait store 1"],
            ["load 1", "wait load 1"],
            ["load 0", "wait load 0"],
        ]
        for _ in range(2):
            stash.reset()
            same(replayed(passes, layers, x, counter), expected)
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["groups"] == N - 1 and numbers["device_in_use"] == 0


def in_order(order, calls_of, owners, inputs, counters):
    """Gradients of a step: 1 is a forward of the next microbatch, -1 the backward of the oldest one."""
    leaves, flying = [x.clone().requires_grad_() for x in inputs], []
    started = iter(range(len(inputs)))
    for entry in order:
        if entry > 0:
            microbatch = next(started)
            y = leaves[microbatch]
            for call in calls_of(microbatch):
                y = call(y, counters[microbatch])
            flying.append(y)
        else:
            flying.pop(0)[:LIVE].sum().backward()
    found = [leaf.grad[:LIVE] for leaf in leaves] + [p.grad.clone() for m in owners for p in m.parameters()]
    for module in owners:
        module.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("told", [True, False], ids=["told", "recorded"])
@pytest.mark.parametrize("order", [[1, 1, -1, -1], [1, 1, -1, 1, -1, 1, -1, -1]], ids=["two in flight", "1F1B"])
def test_pipelines(order, told, numbered, device):
    """One order for the schedule and the captures; counts change from step to step."""
    samples, x = order.count(1), given(device)
    inputs = [(i + 1) * x for i in range(samples)]
    with made(device, **POOL) as stash:
        if device == "cpu":
            numbered(stash)
        layers, plain = twins(stash, device)
        if told:
            stash.schedule_from_order(order, N)
        few = [count(LIVE, device) for _ in range(samples)]
        stash.reset()
        in_order(order, lambda m: layers, layers, inputs, few)
        stash.reset()
        passes = te.make_graphed_callables(
            tuple(layers),
            tuple((x.clone().requires_grad_(), count(LIVE, device)) for _ in range(samples * N)),
            _order=order,
            _num_layers_per_chunk=[N],
        )
        for more in (0, 2, 1):
            counters = [count(LIVE + more * (i % 2), device) for i in range(samples)]
            stash.reset()
            found = in_order(order, lambda m: passes[m * N : m * N + N], layers, inputs, counters)
            same(found, in_order(order, lambda m: plain, plain, inputs, counters))
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["device_in_use"] == 0
            assert numbers["groups"] == samples * N


class Noted(RecordedEvent):
    """An event of the CPU backend that streams note."""

    streams = None

    def record(self, stream=None):
        super().record(stream)
        self.streams.note("event")


def test_copies_are_joined_after_the_event(numbered):
    """Work that waits for the event alone runs beside the copies."""
    counter, x = count(LIVE, "cpu"), given("cpu")
    with made("cpu", **POOL) as stash:
        events = [Noted() for _ in range(N)]
        Noted.streams = streams = numbered(stash)
        layers, _ = twins(stash, "cpu", lambda *of: Recording(*of, events[of[1]]))
        captured(layers, x, counter, stash)
        calls = [found for number, found in sorted(streams.calls.items()) if number]
        assert calls[:2] == [[f"store {i}", "event", f"wait store {i}"] for i in range(2)]


def event_on(device):
    return torch.cuda.Event(external=True) if device == "cuda" else RecordedEvent()


def stream_on(device, name):
    return torch.cuda.Stream() if device == "cuda" else RecordedStream(name)


def test_an_event_before_the_result_is_refused(device):
    counter, x = count(LIVE, device), given(device)
    with made(device, **POOL) as stash:
        events = [event_on(device) for _ in range(N)]
        layers, plain = twins(stash, device, lambda *of: Recording(*of, events[of[1]], early=of[1] == 1))
        passes = captured(layers, x, counter, stash)
        how = {"cuda_graph_stream": [stream_on(device, "graph")] * N, "cuda_graph_event": events}
        stash.reset()
        with refused(ValueError, "'cuda_graph_event'", "before its results", "record it after them"):
            replayed(passes, layers, x, counter, **how)
        stash.reset()
        how["cuda_graph_event"][1] = None
        same(replayed(passes, layers, x, counter, **how), run(plain, x, counter))


def test_a_replay_waits_for_the_whole_of_the_last_one():
    """Whatever stream it runs on, and so does reset()."""
    counter, x = count(LIVE, "cpu"), given("cpu")
    with made("cpu", **POOL) as stash:
        events, streams = [RecordedEvent() for _ in range(N)], [RecordedStream(f"graph {i}") for i in range(N)]
        layers, _ = twins(stash, "cpu", lambda *of: Recording(*of, events[of[1]]))
        passes = captured(layers, x, counter, stash)
        stash.reset()
        main = passes[0].record.backend.current_stream()
        main.log.clear()
        y = x.clone().requires_grad_()
        for i, call in enumerate(passes):
            y = call(y, counter, cuda_graph_stream=streams[i], cuda_graph_event=events[i])
        logs = [[what for what in stream.log if what[2] != "main"] for stream in streams]
        assert logs == [[], [("graph 1", "waits for", "graph 0")], [("graph 2", "waits for", "graph 1")]]
        assert list(main.log) == [("main", "waits for event", event) for event in events]
        main.log.clear()
        stash.gate()
        assert list(main.log) == [("main", "waits for", "graph 2")]
        stash.gate()
        assert len(main.log) == 1
        stash.reset()
        for i, how in enumerate([{"cuda_graph_stream": streams[0], "cuda_graph_event": events[0]}, {}]):
            passes[i](x.clone().requires_grad_(), counter, **how)
        assert main.log[-1] == ("main", "waits for", "graph 0")


@pytest.mark.parametrize("call", ["gate", "reset"])
def test_a_capture_of_the_caller_waits_for_no_replay(call, monkeypatch):
    """No work outside of a capture may be waited for in it. A reset() in it begins the steps of later replays."""
    counter, x = count(LIVE, "cpu"), given("cpu")
    with made("cpu", **POOL) as stash:
        events, side = [RecordedEvent() for _ in range(N)], RecordedStream("graph")
        layers, plain = twins(stash, "cpu", lambda *of: Recording(*of, events[of[1]]))
        passes = captured(layers, x, counter, stash)
        main, expected = passes[0].record.backend.current_stream(), run(plain, x, counter)
        stash.reset()
        y = x.clone().requires_grad_()
        for each, event in zip(passes, events, strict=True):
            y = each(y, counter, cuda_graph_stream=side, cuda_graph_event=event)
        main.log.clear()
        with monkeypatch.context() as patched:
            patched.setattr(manager, "stream_captures", lambda: True)
            getattr(stash, call)()
        assert not main.log
        if call == "reset":
            same(replayed(passes, layers, x, counter), expected)
        else:
            stash.gate()
            assert list(main.log) == [("main", "waits for", "graph")]


@pytest.fixture
def replays(device):
    """(a stash, its captured layers, the layers, their step, its expected results)"""
    counter, x = count(LIVE, device), given(device)
    with made(device, **POOL) as stash:
        layers, plain = twins(stash, device)
        passes = captured(layers, x, counter, stash)
        yield stash, passes, lambda: replayed(passes, layers, x, counter), run(plain, x, counter), (x, counter)


def test_the_first_step_of_replays_begins_by_itself(replays):
    _, _, step, expected, _ = replays
    same(step(), expected)


def test_replays_out_of_order(replays):
    stash, passes, step, expected, (x, counter) = replays
    stash.reset()
    y = passes[0](x.clone().requires_grad_(), counter)
    with refused(RuntimeError, "the forward of graphed", "out of the order", "wanted the forward of", "reset()"):
        passes[2](y, counter)
    with refused(RuntimeError, "the backward of graphed", "out of the order"):
        y.sum().backward()
    stash.reset()
    same(step(), expected)


def test_replays_without_a_reset_between(replays):
    stash, passes, step, expected, (x, counter) = replays
    stash.reset()
    same(step(), expected)
    with refused(RuntimeError, "after the last graph of a step", "PagedStash.reset() before the next step"):
        passes[0](x.clone().requires_grad_(), counter)
    stash.reset()
    same(step(), expected)


def test_a_reset_between_forward_and_backward(replays):
    stash, passes, step, expected, (x, counter) = replays
    stash.reset()
    y = x.clone().requires_grad_()
    for call in passes:
        y = call(y, counter)
    stash.reset()
    with refused(RuntimeError, "the backward of graphed", "PagedStash.reset() has begun a step"):
        y.sum().backward()
    stash.reset()
    same(step(), expected)


def test_close_under_live_graphs(replays):
    stash, passes, _, _, (x, counter) = replays
    stash.close()
    with refused(RuntimeError, "the forward of graphed", "PagedStash.close() has freed", "capture again"):
        passes[0](x.clone().requires_grad_(), counter)


def test_grow_under_live_graphs(device):
    """A count that the pool was not made for: refused without recapture, and right with it."""
    few, all_rows, x = count(LIVE, device), count(ROWS, device), given(device)
    with made(device, device_pages=None, factor=1.0, page_bytes=128) as stash:
        layers, plain = twins(stash, device)
        expected = run(plain, x, few)
        old = captured(layers, x, few, stash)
        stash.reset()
        replayed(old, layers, x, all_rows)
        verdict = stash.verdict(wait=True)
        assert verdict.flags == ("lost",) and verdict.group == 0 and float(stash.gate()) == 1
        with refused(RuntimeError, "PagedStash.grow", "captured", "recapture=fn"):
            stash.grow()
        new = []
        stash.grow(recapture=lambda: new.extend(captured(layers, x, few, stash)))
        with refused(RuntimeError, "PagedStash.grow() has freed", "capture again"):
            old[0](x.clone().requires_grad_(), few)
        for counter in (all_rows, few):
            stash.reset()
            same(replayed(new, layers, x, counter), expected)
            assert stash.verdict(wait=True).ok


def test_grow_whose_recapture_fails(device):
    """The old graphs are refused all the same."""
    few, x = count(LIVE, device), given(device)
    with made(device, device_pages=None, factor=1.0, page_bytes=128) as stash:
        layers, _ = twins(stash, device)
        old = captured(layers, x, few, stash)
        stash.reset()
        replayed(old, layers, x, count(ROWS, device))

        def fail():
            raise MemoryError("no memory")

        with pytest.raises(MemoryError):
            stash.grow(recapture=fail)
        stash.reset()
        with refused(RuntimeError, "PagedStash.grow() has freed", "capture again"):
            old[0](x.clone().requires_grad_(), few)
