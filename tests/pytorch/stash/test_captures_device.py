# Layers with a stash, captured one by one, on a GPU: replays with changing counts equal eager steps without a stash,
# memory does not grow, and work that waits for a layer's event runs beside its copies.
import random

import pytest
import torch
from support import randn

import transformer_engine.pytorch as te

from .cases import ROWS, WIDTH, count, dead_rows_zero, made, report, same
from .test_captures import N, Recording, twins

LIVES = (0, 3, 17, ROWS)

pytestmark = pytest.mark.gpu


def gradients(calls, layers, x, counter, **how):
    """Of the layers; calls: they, or their graphs. Dead rows get gradient 0; reads nothing from the device."""
    y = leaf = x.detach().requires_grad_()
    for i, call in enumerate(calls):
        y = call(y, counter, **{key: value[i] for key, value in how.items()})
    alive = (torch.arange(len(x), device=x.device) < counter)[:, None]
    parameters = [p for layer in layers for p in layer.parameters()]
    return torch.autograd.grad(y, [leaf, *parameters], alive.to(y.dtype).expand_as(y))


def captured(layers, x, counter, stash):
    for _ in range(2):
        stash.reset()
        gradients(layers, layers, x, counter)
    stash.reset()
    samples = tuple((x.clone().requires_grad_(), counter.clone()) for _ in layers)
    return te.make_graphed_callables(tuple(layers), samples, _order=[1, -1], _num_layers_per_chunk=[len(layers)])


@pytest.mark.parametrize("streams", [1, N], ids=["one stream", "a stream each"])
def test_two_thousand_replays(streams):
    """Small counts, and larger ones that spill; with events, the copies of a layer end after its results are read."""
    x, counter = randn(ROWS, WIDTH, device="cuda"), count(17, "cuda")
    inputs = {live: dead_rows_zero(x, live) for live in LIVES}
    choice, seen, allocated = random.Random(5), set(), []
    with made("cuda", device_pages=12, host_pages=400, page_bytes=128) as stash:
        events = [torch.cuda.Event(external=True) for _ in range(N)]
        layers, plain = twins(stash, "cuda", lambda *of: Recording(*of, events[of[1]]))
        expected = {live: gradients(plain, plain, inputs[live], count(live, "cuda")) for live in LIVES}
        passes = captured(layers, inputs[17], counter, stash)
        on = [torch.cuda.Stream() for _ in range(streams)]
        how = {"cuda_graph_stream": [on[i % streams] for i in range(N)], "cuda_graph_event": events}
        for i in range(2000):
            live = choice.choice(LIVES)
            stash.reset()
            found = gradients(passes, layers, inputs[live], count(live, "cuda"), **(how if i % 2 else {}))
            if i % 10 > 1:
                continue
            same(found, expected[live], f"replay {i}, {live} rows")
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
            assert numbers["groups"] == N - 1
            seen.add((live, numbers["spilled_bytes"] > 0))
            if i >= 1000:
                del found
                torch.cuda.synchronize()
                allocated.append(torch.cuda.memory_allocated())
        assert {(0, False), (ROWS, True)} <= seen
        assert max(allocated[-100:]) <= max(allocated[:100])  # replays with and without events differ


def test_work_after_the_event_runs_beside_the_copies():
    """A layer that leaves to the host, over a slow link."""
    rows, width = 8192, 1024

    class Wide(Recording):
        def __init__(self, *of):
            super().__init__(*of)
            self.inner = te.LayerNormMLP(width, 2 * width, device="cuda", params_dtype=torch.bfloat16)

    x, counter = randn(rows, width, device="cuda", dtype=torch.bfloat16), count(rows, "cuda")
    with made("cuda", device_pages=0, host_pages=400, page_bytes=524288) as stash:
        events = [torch.cuda.Event(external=True) for _ in range(2)]
        layers = [Wide(stash, i, "cuda", events[i]) for i in range(2)]
        expected = [g.clone() for g in gradients(layers, layers, x, counter)]
        passes = captured(layers, x, counter, stash)
        stream = torch.cuda.Stream()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for _ in range(2):
            stash.reset()
            torch.cuda.synchronize()
            y = leaf = x.detach().requires_grad_()
            marks[0].record()
            y = passes[0](y, counter, cuda_graph_stream=stream, cuda_graph_event=events[0])
            marks[1].record()
            marks[2].record(stream)
            y = passes[1](y, counter)
            found = torch.autograd.grad(
                y, [leaf, *(p for layer in layers for p in layer.parameters())], torch.ones_like(y)
            )
            same(found, expected)
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["spilled_bytes"] > 2 * rows * width
            result, copied = (marks[0].elapsed_time(mark) for mark in marks[1:])
            assert result < 0.7 * copied, f"the result came after {result} ms, the copies ended after {copied} ms"


def spans(profile):
    """(start, end) in microseconds of the kernels on the device: those of the stash, and those of attention."""
    copies, attention = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            if "stash" in event.name:
                copies.append(span)
            elif any(word in event.name.lower() for word in ("flash", "fmha", "attention", "sdpa")):
                attention.append(span)
    return copies, attention


class Mixture(te.MoEMLP):
    """Records an event after its result."""

    def __init__(self, stash, event):
        super().__init__(1024, 2048, 8, 2, stash=stash, params_dtype=torch.bfloat16, device="cuda")
        self.event = event

    def forward(self, x):
        y, _ = super().forward(x)
        self.event.record()
        return y


def test_a_timeline_of_copies_beside_attention():
    """The copies of a captured mixture run while the eager attention of the next layer does."""
    x = randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    q = randn(4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
    with made("cuda", device_pages=0, host_pages=600, page_bytes=524288) as stash:
        events = [torch.cuda.Event(external=True) for _ in range(2)]
        layers = [Mixture(stash, event) for event in events]
        parameters = [p for layer in layers for p in layer.parameters()]

        def step(first, second, **how):
            stash.reset()
            leaf = x.detach().requires_grad_()
            y = first(leaf, **how)
            for _ in range(4):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
            y = second(y)
            return torch.autograd.grad(y, [leaf, *parameters], torch.ones_like(y))

        expected = [g.clone() for g in step(*layers)]
        step(*layers)
        stash.reset()
        samples = tuple((x.clone().requires_grad_(),) for _ in layers)
        passes = te.make_graphed_callables(tuple(layers), samples, _order=[1, -1], _num_layers_per_chunk=[2])
        how = {"cuda_graph_stream": torch.cuda.Stream(), "cuda_graph_event": events[0]}
        same(step(*passes, **how), expected)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(*passes, **how)
            torch.cuda.synchronize()
        copies, attention = spans(profile)
        assert copies and attention, sorted({event.name for event in profile.events()})
        both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in attention)
        attended = sum(end - start for start, end in attention)
        assert both > 0.3 * attended, f"{both} of {attended} us: copies {copies}, attention {attention}"
