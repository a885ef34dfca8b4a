# Groups: gradients through pages are the bits of a run that keeps everything, for modules of ours, whose nodes say
# themselves what they keep by tokens, and for torch's own operations that declare their tensors. In every step what the
# groups let go is overwritten before the backward, and the bytes taken are those of the live rows. Mutants: no tail
# (TAILS["keep"] for all in pool.py), originals that are held (no let_go), a region from its piece's start, a shared
# storage that is taken once for two groups, members of a dropped group left in the pool: each turns tests red.
import gc
import weakref

import pytest
import torch
from stash_cases import Layers, Originals, count, dead_rows_zero, made, report, same, step
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import saved as door

pytestmark = pytest.mark.usefixtures("fp8_left_off")

ROWS, HIDDEN = 40, 32
COUNTS = [0, 3, 17, ROWS]


class Declared(torch.nn.Module):
    """torch's own operations; what they keep is said to be counted."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(randn(HIDDEN, HIDDEN, device=device, scale=0.2))
        self.stash = None

    def forward(self, x, counter):
        x = self.said(x * 1, counter)
        y = self.said(x @ self.weight, counter)
        z = self.said(torch.tanh(y), counter)  # which tanh keeps too, and said nothing
        a, b = self.said(y.sin(), counter), self.said(x.cos(), counter)
        return self.said(z.bfloat16(), counter).sin().float() + z * (a * b)

    @staticmethod
    def said(t, counter):
        door.mark_pageable(t, counter)
        return t


def declared(layer, x, counter):
    return layer(x, counter)


def ours(kind, device):
    if kind == "linear":
        return [te.Linear(HIDDEN, HIDDEN, bias=i == 1, device=device) for i in range(3)]
    if kind == "layernorm linear":
        return [
            te.LayerNormLinear(HIDDEN, HIDDEN, normalization=n, device=device)
            for n in ("LayerNorm", "RMSNorm", "RMSNorm")
        ]
    if kind == "norms":
        return [
            te.RMSNorm(HIDDEN, device=device),
            te.LayerNorm(HIDDEN, device=device),
            te.RMSNorm(HIDDEN, device=device),
        ]
    return [te.LayerNormMLP(HIDDEN, 48, activation=kind, device=device, bias=i != 1) for i in range(3)]


KINDS = ["linear", "layernorm linear", "norms", "gelu", "swiglu", "srelu", "geglu"]


def stack(kind, device, **how):
    if kind == "declared":
        return Layers(*(Declared(device) for _ in range(3)), prepare=declared, **how)
    return Layers(*ours(kind, device), **how)


def inputs_of(device, lives):
    return [dead_rows_zero(randn(ROWS, HIDDEN, device=device), n) for n in lives]


def agree(stash, module, inputs, counters, steps=2, expected=None, **how):
    """Steps of a stash give the bits of a run without; bytes taken are the live ones, where the report shows them."""
    expected = expected or step(module, inputs, counters, **how)[0]
    for i in range(steps):
        found, overwritten = step(module, inputs, counters, stash, **how)
        same(found, expected, f"step {i}")
        assert overwritten or stash._pool is None, "nothing was stashed"
        numbers = report(stash) if stash._pool is not None else None
        if numbers:
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
        stash.reset()
    return numbers


@pytest.mark.parametrize("live", COUNTS)
@pytest.mark.parametrize("kind", [*KINDS, "declared"])
def test_gradients(kind, live, device):
    module = stack(kind, device)
    with made(device) as stash:
        numbers = agree(stash, module, inputs_of(device, [live]), [count(live, device)], steps=3)
        assert numbers["groups"] == 2 and (numbers["live_bytes"] > 0) == (live > 0)


@pytest.mark.parametrize("live", [3, 17])
def test_the_bytes_are_those_of_live_rows(live, device):
    module, counters = stack("linear", device), [count(live, device)]
    with made(device) as stash:
        agree(stash, module, inputs_of(device, [live]), counters, steps=1)
        step(module, inputs_of(device, [live]), counters, stash)
        assert report(stash)["live_bytes"] == 2 * live * HIDDEN * 4  # of the third its own backward is next
        stash.reset(record=True)
        step(module, inputs_of(device, [live]), counters, stash)
        assert report(stash)["live_bytes"] == 3 * live * HIDDEN * 4


@pytest.mark.parametrize("tail", ["zero", "tile", "keep"])
@pytest.mark.parametrize("policy", ["ring", "stack", "bump"])
@pytest.mark.parametrize("tier", ["device", "mixed", "host"])
def test_policies_tiers_and_tails(tier, policy, tail, device):
    pages = {"device": (256, 0), "mixed": (7, 256), "host": (0, 256)}[tier]
    module = stack("swiglu" if tail != "keep" else "declared", device, tail=tail)
    if tail == "keep":  # what is behind the live rows is anything: these are row by row, and weights are let be
        for layer in module.layers:
            layer.weight.requires_grad_(False)
    with made(device, device_pages=pages[0], host_pages=pages[1], policy=policy, debug=True) as stash:
        numbers = agree(stash, module, inputs_of(device, [17]), [count(17, device)], order="lifo")
        assert (numbers["spilled_bytes"] > 0) == (tier != "device")


def test_eviction(device):
    """The groups whose backward is farthest leave for the host, and the next ones stay."""
    module, counters = stack("linear", device, scheduled=True), [count(17, device)]
    module.layers.extend(stack("linear", device).layers)
    with made(device, device_pages=32, host_pages=64, low_water=16) as stash:  # a group wants 9 pages
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
            handles = sorted(stash.step._handles, key=lambda handle: handle.name)
            on_host = [
                h.name for h in handles if h.state != "kept" and h._group.read(stash.lanes.current())["host_pages"]
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


@pytest.mark.parametrize("how", ["te", "te reentrant", "torch", "around"])
def test_beside_checkpoints(how, device):
    """Inside of a group it keeps its input alone; a group inside of one takes nothing."""
    layers = ours("gelu", device)

    def run(layer, x, counter):
        if how == "te":
            return te.checkpoint(layer, Declared.said(x * 1, counter), use_reentrant=False)
        if how == "te reentrant":
            return te.checkpoint(layer, Declared.said(x * 1, counter), use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(layer, Declared.said(x * 1, counter), use_reentrant=False)

    counters = [count(17, device)]
    with made(device) as stash:
        if how != "around":
            module = Layers(*layers, prepare=run)
            given = inputs_of(device, [17])
            expected, _ = step(module, given, counters)
            for _ in range(2):
                found, overwritten = step(module, given, counters, stash)
                same(found, expected)
                assert overwritten or how == "torch"  # which keeps what it begins with where no hook sees it
                stash.reset()
            return
        module, (x,) = Layers(*layers), inputs_of(device, [17])
        expected, _ = step(module, [x], counters)
        x = x.requires_grad_()
        y = te.checkpoint(lambda x: module(x, counters[0], stash), x, use_reentrant=False)
        y[:17].sum().backward()
        same([y[:17], x.grad[:17], *(p.grad for p in module.parameters())], expected)
        assert not stash.step.names


@pytest.mark.parametrize("order", ["inside", "around"])
def test_beside_offload(order, device, monkeypatch):
    from transformer_engine.pytorch.cpu_offload import layer as offload_layer

    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 64)
    layers, (x,), counter = ours("gelu", device), inputs_of(device, [17]), count(17, device)

    def run(context=None, sync=None, stash=None):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        y = given = x.clone().requires_grad_()
        with Originals() as originals:
            for i, layer in enumerate(layers):
                if context is None:
                    y = layer(y)
                    continue
                group = stash.group(i, counter)
                with context if order == "inside" else group, group if order == "inside" else context:
                    y = layer(y)
                y = sync(y)
            if stash is not None:
                stash.step.free_leaving()
                originals.overwrite(given)
        y.backward(torch.ones_like(y) * (torch.arange(ROWS, device=device)[:, None] < 17))
        return [y.detach()[:17], given.grad[:17], *(p.grad for layer in layers for p in layer.parameters())], originals

    expected, _ = run()
    context, sync = te.get_cpu_offload_context(True, 2, 3)
    with made(device) as stash:
        for _ in range(2):
            found, originals = run(context, sync, stash)
            same(found, expected)
            assert originals.overwritten > 0
            stash.reset()


def test_delayed_weight_gradients(device):
    layers = [te.LayerNormMLP(HIDDEN, 48, device=device, delay_wgrad_compute=True) for _ in range(3)]
    plain = [te.LayerNormMLP(HIDDEN, 48, device=device) for _ in range(3)]
    for a, b in zip(layers, plain, strict=True):
        b.load_state_dict(a.state_dict())
    given, counters = inputs_of(device, [17]), [count(17, device)]
    expected, _ = step(Layers(*plain), given, counters)
    with made(device) as stash:
        for _ in range(2):
            module = Layers(*layers)
            found, overwritten = step(module, given, counters, stash)
            for layer in reversed(layers):
                layer.backward_dw()
            same(found[:2] + [p.grad for p in module.parameters()], expected)
            assert overwritten
            stash.reset()


RECIPES = [recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8BlockScaling]


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8(recipe, device):
    """What is kept with its rows along another dimension stays."""
    torch.manual_seed(3)
    layers = [te.LayerNormMLP(128, 256, activation="swiglu", device=device) for _ in range(2)]
    x = dead_rows_zero(randn(128, 128, device=device), 48)

    def run(layer, x, counter):
        with te.autocast(enabled=True, recipe=recipe()):
            return layer(x)

    import copy

    first, second = (Layers(*copy.deepcopy(layers), prepare=run) for _ in range(2))
    with made(device) as stash:
        for _ in range(3):
            expected, _ = step(first, [x], [count(48, device)])
            found, overwritten = step(second, [x], [count(48, device)], stash)
            same(found, expected)
            assert overwritten and report(stash)["flags"] == 0
            stash.reset()


def test_frozen_layers_and_eval(device):
    module, given, counters = stack("gelu", device), inputs_of(device, [17]), [count(17, device)]
    for p in module.layers[1].parameters():
        p.requires_grad_(False)
    with made(device) as stash:
        agree(stash, module, given, counters, steps=3)
        for p in module.layers[0].parameters():
            p.requires_grad_(False)
        expected, _ = step(module, given, counters)
        same(step(module, given, counters, stash)[0], expected)
        stash.reset()
        with torch.no_grad():
            y = module(given[0], counters[0], stash)
        assert not stash.step.passed and not y.requires_grad
        module.eval()
        agree(stash, module, given, counters, steps=2)


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
            te.mark_not_offload(c)  # before it left
        stash.step.free_leaving()
        assert report(stash)["live_bytes"] == 17 * HIDDEN * 4
        (y.sum() + z.sum()).backward()


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
        assert report(stash)["device_in_use"] == 0  # the plan's graph is gone


def test_originals_are_dead_behind_the_wait(device):
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
        assert ref() is not None  # it is being copied
        stash.pre_schedule(z)
        gc.collect()
        assert ref() is None
        z.sum().backward()
