# Groups: gradients through pages are the bits of a run that keeps everything, for modules of ours, whose nodes say
# themselves what they keep by tokens, and for torch's own operations that declare their tensors. In every step what the
# groups let go is overwritten before the backward, and the bytes taken are those of the live rows. Mutants: no tail
# (TE_STASH_TAIL_KEEP for all in stash_api.cpp), a region from its piece's start, a shared storage that is taken once
# for two groups, members of a dropped group left in the pool, ~Stashed that leaves its piece the memory: each turns
# tests red.
import gc
import weakref

import pytest
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import saved as door

from .cases import Layers, Originals, count, dead_rows_zero, made, report, same, step
from .layers import HIDDEN, ROWS, agree, inputs_of, ours, stack

pytestmark = pytest.mark.usefixtures("fp8_left_off")
COUNTS = [0, 3, 17, ROWS]


KINDS = ["linear", "layernorm linear", "norms", "gelu", "swiglu", "srelu", "geglu"]


@pytest.mark.parametrize("live", COUNTS)
@pytest.mark.parametrize("kind", [*KINDS, "declared"])
def test_gradients(kind, live, device):
    module = stack(kind, device)
    with made(device) as stash:
        numbers = agree(stash, module, inputs_of(device, [live]), [count(live, device)], steps=3)
        assert numbers["groups"] == 2 and (numbers["live_bytes"] > 0) == (live > 0)


@pytest.mark.parametrize("live", COUNTS)
def test_a_preactivation_in_fp8(live, device):
    """Its scales of 1 x 128 blocks have a column for each token: the live columns leave."""
    taken = {}
    for kind in (None, "fp8"):
        options = {"activation": "swiglu", "save_preactivation": kind, "device": device}
        module = Layers(*(te.LayerNormMLP(HIDDEN, 144, **options) for _ in range(3)))
        with made(device, debug=True) as stash:
            taken[kind] = agree(stash, module, inputs_of(device, [live]), [count(live, device)], steps=3)["live_bytes"]
    assert taken[None] - taken["fp8"] == 2 * live * (288 * 4 - 288 - 3 * 4)


@pytest.mark.parametrize("live", [3, 17])
def test_the_bytes_are_those_of_live_rows(live, device):
    module, counters = stack("linear", device), [count(live, device)]
    with made(device) as stash:
        agree(stash, module, inputs_of(device, [live]), counters, steps=1)
        step(module, inputs_of(device, [live]), counters, stash)
        assert report(stash)["live_bytes"] == 2 * live * HIDDEN * 4  # the third stays, as its own backward is next
        stash.reset(record=True)
        step(module, inputs_of(device, [live]), counters, stash)
        assert report(stash)["live_bytes"] == 3 * live * HIDDEN * 4


@pytest.mark.parametrize("tail", ["zero", "tile", "keep"])
@pytest.mark.parametrize("policy", ["ring", "stack", "bump"])
@pytest.mark.parametrize("tier", ["device", "mixed", "host"])
def test_policies_tiers_and_tails(tier, policy, tail, device):
    pages = {"device": (256, 0), "mixed": (7, 256), "host": (0, 256)}[tier]
    module = stack("swiglu" if tail != "keep" else "declared", device, tail=tail)
    if tail == "keep":  # dead rows are undefined: the layers work row by row, and weights get no gradient
        for layer in module.layers:
            layer.weight.requires_grad_(False)
    with made(device, device_pages=pages[0], host_pages=pages[1], policy=policy, debug=True) as stash:
        numbers = agree(stash, module, inputs_of(device, [17]), [count(17, device)], order="lifo")
        assert (numbers["spilled_bytes"] > 0) == (tier != "device")


def test_eviction(device):
    """The groups with the latest backwards move to the host, and the next ones stay."""
    module, counters = stack("linear", device, scheduled=True), [count(17, device)]
    module.layers.extend(stack("linear", device).layers)
    with made(device, device_pages=32, host_pages=64, low_water=16) as stash:  # a group needs 9 pages
        numbers = agree(stash, module, inputs_of(device, [17]), counters, steps=3)
        assert numbers["evicted_pages"] > 0


def test_the_farthest_groups_are_evicted(device):
    """Four groups of 3 pages and the last, which is kept; 10 pages, of which 4 stay free: the first two groups leave,
    and not those that come back next. Mutant: a group that the device let be counted as evicted."""
    module = torch.nn.ModuleList(torch.nn.Linear(64, 64, device=device) for _ in range(5))
    x, counter = torch.randn(16, 64, device=device), count(3, device)
    with made(device, device_pages=10, host_pages=64, low_water=4) as stash:
        for _ in range(2):
            stash.reset()
            y = x.clone().requires_grad_()
            for i, layer in enumerate(module):
                y = stash.pre_schedule(y)
                with stash.group(i):
                    y = y * 1.0
                    stash.mark_pageable(y, counter)
                    y = layer(y)
                y = stash.post_schedule(y)
            handles = sorted(stash.step.handles, key=lambda handle: handle.name)
            on_host = [
                h.name for h in handles if h.state != "kept" and h.group.read(stash.streams.current())["host_pages"]
            ]
            y.sum().backward()
        assert on_host == [0, 1]


@pytest.mark.parametrize("order", ["fifo", "lifo"])
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("kind", ["gelu", "declared"])
def test_microbatches_in_flight(kind, scheduled, order, device):
    module = stack(kind, device, scheduled=scheduled)
    lives = [17, 0, ROWS]
    counters = [count(n, device) for n in lives]
    with made(device, device_pages=None) as stash:
        agree(stash, module, inputs_of(device, lives), counters, steps=3, order=order)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_graph_gone_through_twice(scheduled, device):
    module, (x,), counter = stack("gelu", device, scheduled=scheduled), inputs_of(device, [17]), count(17, device)

    def run(stash=None):
        module.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        with Originals() as originals:
            y = module(given, counter, stash)
            if stash is not None:
                stash.step.free_leaving()
                assert originals.overwrite(given)
        y[:17].sum().backward(retain_graph=True)
        first = [given.grad[:17].clone()] + [p.grad.clone() for p in module.parameters()]
        y[:17].sum().backward()
        return first + [given.grad[:17]] + [p.grad for p in module.parameters()]

    expected = run()
    with made(device) as stash:
        for _ in range(3):
            same(run(stash), expected)
            assert report(stash)["device_in_use"] == 0
            stash.reset()


def test_a_tensor_of_two_groups(device):
    x, counter = dead_rows_zero(randn(ROWS, HIDDEN, device=device), 17), count(17, device)

    def run(stash=None):
        given = x.clone().requires_grad_()
        middle = given * 1
        door.mark_pageable(middle, counter)
        with Originals() as originals:
            if stash is None:
                y = middle.sin() + middle.cos()
            else:
                with stash.group("a"):
                    a = middle.sin()
                with stash.group("b"):
                    b = middle.cos()
                y = a + b
                stash.step.free_leaving()
                del middle
                gc.collect()
                assert originals.overwrite() == x.nbytes
        y[:17].sum().backward()
        return [given.grad[:17]]

    expected = run()
    with made(device) as stash:
        same(run(stash), expected)
        assert report(stash)["live_bytes"] == 2 * 17 * HIDDEN * 4 and report(stash)["device_in_use"] == 0


def test_what_is_marked_stays(device):
    x, counter = randn(ROWS, HIDDEN, device=device), count(17, device)
    given = x.requires_grad_()
    a, b = given * 1, given * 2
    for t in (a, b):
        door.mark_pageable(t, counter)
    te.mark_not_offload(a)
    with made(device) as stash:
        with Originals() as originals, stash.group("a"):
            y = a.sin() + b.sin()
        stash.step.free_leaving()
        assert originals.overwrite(b) == b.nbytes
        te.mark_not_offload(b)
        assert report(stash)["live_bytes"] == 17 * HIDDEN * 4
        with stash.group("b"):
            c = given * 3
            door.mark_pageable(c, counter)
            z = c.sin()
            te.mark_not_offload(c)  # before it is stored
        stash.step.free_leaving()
        assert report(stash)["live_bytes"] == 17 * HIDDEN * 4
        (y.sum() + z.sum()).backward()


@pytest.mark.parametrize("state", ["kept", "back"])
def test_memory_of_a_finished_node_is_freed_alone(state, device):
    """A tensor's memory lives as long as its node, not as long as the group."""
    counter = count(17, device)
    with made(device, device_pages=None if state == "kept" else 4096) as stash:
        given = randn(ROWS, HIDDEN, device=device, requires_grad=True)
        with stash.group("a"):
            a, b = given * 1, given * 2
            for t in (a, b):
                door.mark_pageable(t, counter)
            y, z = a.sin(), b.sin()
        del a, b, t
        (handle,) = stash.step.handles
        assert [segment.memory is None for segment in handle.segments] == [False, False]
        stash.step.free_leaving()
        y[:17].sum().backward(inputs=[given])
        assert handle.state == state
        assert [segment.memory is None for segment in handle.segments] == [True, False]
        z[:17].sum().backward(inputs=[given])
        assert [segment.memory is None for segment in handle.segments] in ([], [True, True])


def test_counts_are_announced_inside_of_a_group_alone(device):
    """After the group, nodes announce what they announced before it: nothing."""
    counter, layer = count(17, device), te.Linear(HIDDEN, HIDDEN, device=device)

    class Handler(door.StorageHandler):
        takes = True

        def __init__(self):
            super().__init__()
            self.found = []

        def take(self, tensor):
            self.found.append(door.live_rows(tensor))

    with made(device) as stash:
        inside, behind = Handler(), Handler()
        with stash.group("a", counter), door.Hooks(inside):
            layer(randn(ROWS, HIDDEN, device=device, requires_grad=True) * 1)
        with door.Hooks(behind):
            layer(randn(ROWS, HIDDEN, device=device, requires_grad=True) * 1)
        assert any(rows is not None and rows[0] is counter for rows in inside.found)
        assert behind.found and not any(behind.found)


def test_the_memory_plan(device):
    layers, counter = ours("gelu", device), count(17, device)
    with made(device) as stash:

        class Stack(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Layers(*layers)

            def forward(self, x):
                return self.inner(x, counter, stash)

        sample = randn(ROWS, HIDDEN, device=device, requires_grad=True)
        plan = te.memory_plan(Stack(), sample)
        stashed = [row for row in plan.rows if row.status == "stashed"]
        assert stashed and all(ROWS % row.bytes != 0 for row in stashed) and "stashed" in str(plan)
        assert report(stash)["device_in_use"] == 0  # the plan's graph was freed


def test_originals_are_freed_after_the_wait(device):
    counter = count(17, device)
    with made(device) as stash:
        x = randn(ROWS, HIDDEN, device=device, requires_grad=True) * 1
        door.mark_pageable(x, counter)
        ref = weakref.ref(x.untyped_storage())
        stash.pre_schedule(x)
        with stash.group("a"):
            y = x.sin()
        z = stash.post_schedule(y)
        del x
        gc.collect()
        assert ref() is not None  # while it is copied
        stash.pre_schedule(z)
        gc.collect()
        assert ref() is None
        z.sum().backward()
