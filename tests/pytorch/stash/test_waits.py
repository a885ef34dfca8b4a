# The waits between streams: on streams whose work runs as late, or as early, as the waits allow, steps have the bits of
# a run without a stash, and the same pages as on streams that run at once; with any wait left out they do not.
# Therefore a CPU finds a wait that is missing on a device.
import gc

import pytest
import torch
from support import randn

from transformer_engine.pytorch.stash.segments import Segment

from .cases import count, filled, made, report, scribble
from .pipelines import PIPELINES, chunks_in_order
from .streams import late_streams

CPU = "cpu"


def whole(results):
    return [None if r is None else r.view(torch.uint8).tolist() for r in results]


def pipeline(name, left_out=None, hurry=None, **options):
    """Whether two steps of a pipeline had the right bits, the right maps and a clean report."""
    order, layers = PIPELINES[name]
    counters = [count(4 + 5 * i % 23, CPU) for i in range(max(order) * layers)]
    expected = whole(chunks_in_order(order, layers, counters, CPU))
    right, maps = True, []
    with made(CPU, close=False, **options) as stash:
        streams = late_streams(stash, left_out, hurry)
        try:
            for _ in range(2):
                found = whole(chunks_in_order(order, layers, counters, CPU, stash))
                numbers = report(stash)
                right &= found == expected and numbers["flags"] == 0
                right &= numbers["device_in_use"] == numbers["host_in_use"] == 0
                maps.append(shown(numbers))
                streams.flush()
                stash.reset()
        except RuntimeError as error:
            if left_out is None:
                raise
            right, maps = False, str(error)
        assert left_out is None or streams.left, f"no wait matches {left_out}"
    return right, maps


RING, STACK = {"policy": "ring"}, {"policy": "stack"}
SPILLS = {"policy": "stack", "device_pages": 9, "host_pages": 400}
EVICTS = {"policy": "ring", "device_pages": 24, "host_pages": 400, "low_water": 12}


def at_once(name, **options):
    """Numbers of the same steps on streams that run at once."""
    order, layers = PIPELINES[name]
    counters = [count(4 + 5 * i % 23, CPU) for i in range(max(order) * layers)]
    found = []
    with made(CPU, **options) as stash:
        for _ in range(2):
            chunks_in_order(order, layers, counters, CPU, stash)
            found.append(shown(report(stash)))
            stash.reset()
    return found


def shown(numbers):
    return {k: numbers[k] for k in ("device_peak", "host_peak", "evicted_pages", "spilled_bytes")}


@pytest.mark.parametrize("hurry", [None, "load", "store", "evict"])
@pytest.mark.parametrize("options", [RING, STACK, SPILLS, EVICTS], ids=["ring", "stack", "spills", "evicts"])
@pytest.mark.parametrize("name", ["1F1B rank 0", "interleaved"])
def test_pipelines_on_late_streams(name, options, hurry):
    right, numbers = pipeline(name, hurry=hurry, **options)
    assert right and numbers == at_once(name, **options)


@pytest.mark.parametrize(
    ("waiting", "awaited", "options", "hurry"),
    [
        ("store", "produced", RING, None),
        ("load", "memory", RING, None),
        ("compute", "store", RING, None),  # before the originals are freed
        ("compute", "load", RING, None),
        ("load", "store", SPILLS, "load"),
    ],
)
def test_a_wait_that_is_left_out_of_a_pipeline(waiting, awaited, options, hurry):
    right, numbers = pipeline("1F1B rank 0", (waiting, awaited), hurry, **options)
    assert not right or numbers != at_once("1F1B rank 0", **options)


def explicit(left_out, act, hurry=None, **options):
    """Runs act(stash, tensors, streams), which returns whether its results were right."""
    with made(CPU, close=False, page_bytes=128, **{"device_pages": 64, **options}) as stash:
        streams = late_streams(stash, left_out, hurry)
        t = [filled(8, 64, torch.uint8, CPU, seed=i) for i in range(4)]
        try:
            right = act(stash, t, streams)
            streams.flush()
        except (RuntimeError, AttributeError):
            if left_out is None:
                raise
            right = False
        assert left_out is None or streams.left, f"no wait matches {left_out}"
        return right


def ahead_then_store(stash, t, streams):
    """A group is loaded, and another one is stored into the pages that it frees."""
    one, values = count(8, CPU), [x.clone() for x in t]
    a = stash.stash("a", t[:1], one)
    a.start_load()
    b = stash.stash("b", t[1:2], one)
    scribble(*t)
    a.finish_load()
    back = stash.reload(b)[0]
    return torch.equal(back, values[1]) and torch.equal(a.segments[0].memory.view(8, 64), values[0])


def own_store(stash, t, streams):
    """A load runs after its store, although no call has waited for the store."""
    one, value = count(8, CPU), t[0].clone()
    handle = stash.step.new_handle("a")
    segment = Segment(t[0].view(-1))
    segment.add(0, 8, 64, one, 1)
    handle.add(segment)
    pool = stash.ensure_pool()
    handle.store(pool)
    handle.group.allocate(handle)
    pool.load(handle, False)
    streams.wait(handle.loaded)
    return torch.equal(handle.segments[0].memory.view(8, 64), value)


def evict_after_a_load(stash, t, streams):
    """Pages that an earlier load frees count as free, so that no page has to move."""
    one = count(8, CPU)
    a, b = (stash.stash(n, [x], one) for n, x in zip("ab", t, strict=False))
    a.start_load()
    b.evict(4)
    a.finish_load()
    stash.reload(b)
    return report(stash)["evicted_pages"] == 0


def load_after_an_evict(stash, t, streams):
    one, values = count(8, CPU), [x.clone() for x in t]
    a, b = (stash.stash(n, [x], one) for n, x in zip("ab", t, strict=False))
    b.evict(100)
    first = stash.reload(a)[0]
    return streams.ran[-2:] == ["evict b", "load a"] and torch.equal(first, values[0])


def release_while_it_loads(stash, t, streams):
    """Memory that a copy still writes to is not reused before its end."""
    handle = stash.stash("a", t[:1], count(8, CPU))
    handle.start_load()
    memory = handle.segments[0].memory
    handle.release()
    memory.fill_(7)  # its next user
    streams.flush()
    return bool((memory == 7).all())


def release_while_it_stores(stash, t, streams):
    with stash.group("a"):
        x = randn(8, 16, device=CPU, requires_grad=True) * 1
        stash.mark_pageable(x, count(8, CPU))
        y = x.sin()
    del x, y
    gc.collect()
    return streams.ran[:2] == ["store a", "drop a"] and report(stash)["device_in_use"] == 0


def drop_is_joined(stash, t, streams):
    handle = stash.stash("a", t[:1], count(8, CPU))
    del handle
    gc.collect()
    return streams.ran == ["store a", "drop a"]


def reset_joins(stash, t, streams):
    with stash.group("a"):
        x = randn(8, 16, device=CPU, requires_grad=True) * 1
        stash.mark_pageable(x, count(8, CPU))
        y = x.sin()
    assert streams.ran == []
    stash.reset()
    streams.flush()
    del y
    return report(stash)["device_in_use"] == 0 and report(stash)["groups"] == 0


def report_joins(stash, t, streams):
    with stash.group("a"):
        x = randn(8, 16, device=CPU, requires_grad=True) * 1
        stash.mark_pageable(x, count(8, CPU))
        y = x.sin()
    return report(stash)["groups"] == 1 and y is not None


def gate_joins(stash, t, streams):
    with stash.group("a"):
        x = randn(8, 16, device=CPU, requires_grad=True) * 1
        stash.mark_pageable(x, count(100, CPU))
        y = x.sin()
    return float(stash.gate()) == 1 and y is not None


EIGHT = {"device_pages": 8, "host_pages": 8}
CASES = {
    "a store after earlier loads": (ahead_then_store, ("store b", "load a"), {"device_pages": 4}),
    "a load after its store": (own_store, ("load a", "store a"), {}),
    "an evict after loads": (
        evict_after_a_load,
        ("evict", "load"),
        {"device_pages": 8, "host_pages": 8, "hurry": "evict"},
    ),
    "a load after an evict": (load_after_an_evict, ("load a", "evict"), {"host_pages": 8}),
    "memory of a load in progress": (release_while_it_loads, ("compute", "load a"), {}),
    "a drop after its store": (release_while_it_stores, ("drop a", "store a"), {}),
    "a drop": (drop_is_joined, ("compute", "drop a"), {}),
    "a reset": (reset_joins, ("compute", "store a"), {}),
    "a report": (report_joins, ("compute", "store a"), {}),
    "the gate": (gate_joins, ("compute", "store a"), {}),
}


@pytest.mark.parametrize("left_out", [False, True], ids=["waits", "left out"])
@pytest.mark.parametrize("case", CASES)
def test_waits(case, left_out):
    act, wait, options = CASES[case]
    assert explicit(wait if left_out else None, act, **options) == (not left_out)
