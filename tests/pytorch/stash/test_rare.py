# Rare uses of a stash: names of classes of their own, groups of a stash that is closed or that was dropped, handles of
# steps before, tensors that are dropped between a group and its scheduler. Mutants of csrc/stash: no look at the
# microbatch in backward() (stash_schedule.cpp), nothing stored after a load that keeps (stash_pool.cpp): each turns
# tests red.
import enum
import gc
import weakref

import pytest
import torch
from support import randn, refused

from transformer_engine.pytorch.stash import PagedStash

from .cases import LIVE, ROWS, WIDTH, count, filled, made, pinned_bytes, report, same


class Tail(str, enum.Enum):
    ZERO = "zero"


def product(stash, x, w, counter, name="a", **how):
    """x @ w in a group of its own, which saves x."""
    with stash.group(name, counter, **how):
        stash.mark_pageable(x, counter)
        return x @ w


def parts(device):
    x = randn(ROWS, WIDTH, device=device)
    x[LIVE:] = 0
    return x, randn(WIDTH, WIDTH, device=device).requires_grad_(), count(LIVE, device)


def test_a_tail_by_an_enum(device):
    with made(device) as stash:
        x, w, counter = parts(device)
        product(stash, x, w, counter, tail=Tail.ZERO).sum().backward()
        same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])
        assert not stash.reload(stash.stash("b", [x + 1], counter, tail=Tail.ZERO))[0][LIVE:].any()
        with refused(ValueError, "PagedStash.group", "'tail'"):
            stash.group("a", counter, tail="\ud800")


def test_units_beyond_64_bits(device):
    with made(device) as stash:
        with refused(ValueError, "12 rows", "'unit_rows'", str(2**70)):
            stash.stash("a", [filled(12, 8, torch.uint8, device)], count(3, device), unit_rows=2**70)
        handle = stash.stash("a", [torch.empty(0, 8, device=device)], count(0, device), unit_rows=2**70)
        assert stash.reload(handle)[0].shape == (0, 8)


def test_rows_without_bytes_are_not_over_capacity(device):
    """Their count is in range; a flag would make the optimizer skip a good step."""
    with made(device) as stash:
        handle = stash.stash(
            "a", [torch.empty(5, 0, device=device), filled(5, 4, torch.uint8, device)], count(2, device)
        )
        assert [t.shape for t in stash.reload(handle)] == [(5, 0), (5, 4)]
        handle = stash.stash("b", [torch.empty(5, 0, device=device)], count(2, device))
        assert stash.reload(handle)[0].shape == (5, 0)
        assert stash.verdict(wait=True).ok and float(stash.gate()) == 0


def test_a_negated_view_is_refused(device):
    """Its bytes have the opposite sign."""
    with made(device) as stash:
        negated = torch.randn(5, 4, dtype=torch.complex64, device=device).conj().imag.view(5, 4)
        assert negated.is_neg()
        with refused(ValueError, "'tensors'[0]", "contiguous"):
            stash.stash("a", [torch._neg_view(torch.randn(5, 4, device=device))], count(2, device))
        with refused(ValueError, "'tensors'[0]", "contiguous"):
            stash.stash("a", [negated], count(2, device))


def test_a_group_of_a_stash_that_is_closed(device):
    before, (x, w, counter) = pinned_bytes(), parts(device)
    with made(device, close=False, host_pages=8) as stash:
        late = stash.group("late", counter)
        with stash.group("a", counter):
            stash.mark_pageable(x, counter)
            y = x @ w
            stash.close()
        with refused(RuntimeError, "PagedStash.group", "is closed"), late:
            pass
        gc.collect()
        assert stash._pool is None and pinned_bytes() == before
        y.sum().backward()
        same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])


def test_a_group_outlives_its_stash(device):
    x, w, counter = parts(device)
    group = PagedStash(page_bytes=256, device_pages=64, device=device).group("a", counter)
    gc.collect()
    with made(device) as other, group:
        other.mark_pageable(x, counter)
        y = x @ w
    assert group.handle.state == "stored"
    y.sum().backward()
    same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])


class Named(torch.nn.Module):
    """A layer that is the name of its own group, and holds the stash that holds the name."""

    def __init__(self, stash, w):
        super().__init__()
        self.stash, self.w = stash, torch.nn.Parameter(w.detach())

    def forward(self, x, counter):
        return self.stash.post_schedule(product(self.stash, self.stash.pre_schedule(x), self.w, counter, self))


def test_a_closed_stash_holds_no_names(device):
    x, w, counter = parts(device)
    with made(device, device_pages=None) as stash:
        module = Named(stash, w)
        for _ in range(2):
            stash.reset()
            module(x.clone().requires_grad_(), counter).sum().backward()
    gone = weakref.ref(module)
    del module, stash
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:PagedStash. stashing costs memory")
def test_a_handle_of_the_step_before_is_no_load_of_this_one(device):
    """It was kept, as there was no pool; the next recorded step has groups of the same name."""
    with made(device, page_bytes=128, device_pages=None, factor=1.0) as stash:
        t, counter = filled(8, 64, torch.uint8, device), count(8, device)
        stash.reset()
        old = stash.stash("a", [t], counter)
        stash.reset()
        first = stash.stash("a", [t], counter)
        stash.reload(old)
        handles = [first, stash.stash("b", [t], counter)]
        for handle in handles:
            stash.reload(handle)
        stash.reset()
        assert stash.plan().peak_pages == 2 * 4
        assert all(handle.group is None for handle in handles)


def test_no_tensor_that_requires_a_gradient_after_a_group(device):
    with made(device) as stash:
        x, w, counter = parts(device)
        for _ in range(2):
            y = product(stash, stash.pre_schedule(x), w.detach(), counter)
            assert stash.post_schedule(y) is y
        y = product(stash, stash.pre_schedule(x), w, counter)
        stash.post_schedule(y).sum().backward()
        assert report(stash)["device_in_use"] == 0


def test_what_is_dropped_between_a_group_and_its_scheduler(device):
    with made(device) as stash:
        x, w, counter = parts(device)
        with stash.group("a", count(LIVE, device)):
            pass
        stash.reset()
        start, other = stash.pre_schedule(x.clone().requires_grad_()), x.clone()
        with stash.group("b", counter) as group:
            for t in (start, other):
                stash.mark_pageable(t, counter)
            y, dropped = start @ w, other @ w
        del dropped, other
        y = stash.post_schedule(y)
        assert group.handle.state == "stored" and len(group.handle.segments) == 1
        y.sum().backward()
        same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])


def test_a_counter_that_changes_between_a_group_and_its_scheduler(device):
    with made(device) as stash:
        x, w, counter = parts(device)
        y = product(stash, stash.pre_schedule(x), w, counter)
        counter.add_(1)
        with refused(RuntimeError, "counter", "'a'", "changed in place"):
            stash.post_schedule(y)
        stash.reset()
        counter = count(LIVE, device)
        stash.post_schedule(product(stash, stash.pre_schedule(x), w, counter)).sum().backward()
        assert stash.verdict(wait=True).ok


def test_rows_that_do_not_fill_units(device):
    """With whole units alone, the last rows would be lost."""
    with made(device) as stash:
        x, w, counter = randn(10, WIDTH, device=device), parts(device)[1], count(3, device)
        with refused(ValueError, "10 rows", "multiple", "4"), stash.group("a", counter):
            stash.mark_pageable(x, counter, unit_rows=4)
            x @ w


def test_what_came_back_outlives_its_step(device):
    """A retained graph does this."""
    with made(device) as stash:
        x, w, counter = parts(device)
        y = product(stash, x, w, counter)
        product(stash, randn(ROWS, WIDTH, device=device), w, count(LIVE, device), "b")
        for _ in range(2):
            w.grad = None
            y.sum().backward(retain_graph=True)
            same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])
            stash.reset()


def test_what_leaves_has_left_when_a_backward_reads_another(device):
    with made(device) as stash:
        x, w, counter = parts(device)
        y = product(stash, x, w, counter)
        with stash.group("b", count(LIVE, device)) as group:
            stash.mark_pageable(other := x + 1, group_count := count(LIVE, device))
            z = other @ w
        assert group.handle.state == "stored"
        y.sum().backward()
        assert group.handle.state == "away"
        del z, group_count


def test_a_group_that_fails_between_its_schedulers(device):
    """The next backward runs in the same step."""
    with made(device) as stash:
        x, w, counter = parts(device)
        stash.pre_schedule(x)
        with pytest.raises(KeyError), stash.group("a", counter):
            raise KeyError
        start = stash.pre_schedule(x)
        stash.post_schedule(product(stash, start, w, counter)).sum().backward()
        same([w.grad], [x.t() @ torch.ones(ROWS, WIDTH, device=device)])


def test_hundreds_of_handles_are_over_with_their_step(device):
    """Expired handles are swept from the step's list; pages of the others belong to the next step."""
    with made(device) as stash:
        t, counter = filled(5, 4, torch.uint8, device), count(2, device)
        handles = [stash.stash(i, [t], counter) for i in range(200)]
        for i in range(200):
            stash.stash(-1 - i, [t], counter)
        stash.reset()
        for handle in handles:
            with refused(RuntimeError, repr(handle.name), "pages are gone"):
                stash.reload(handle)


def test_a_recorded_group_comes_back_once(device):
    """A plan would count its pages twice."""
    with made(device) as stash:
        x, w, counter = parts(device)
        y = product(stash, x, w, counter)
        product(stash, x + 1, w, count(LIVE, device), "b").sum().backward()
        y.sum().backward()
        del y
        gc.collect()
        assert [(e.store, e.key[0]) for e in stash.step.trace] == [(True, "a"), (True, "b"), (False, "b"), (False, "a")]


def test_a_backward_of_another_microbatch_is_named(device):
    with made(device) as stash:

        def step(first, last):
            x, w, _ = parts(device)
            results = []
            for t in (x, x + 1):
                results.append(stash.post_schedule(product(stash, stash.pre_schedule(t), w, count(LIVE, device))))
            results[first].sum().backward()
            results[last].sum().backward()

        step(1, 0)
        stash.reset()
        step(1, 0)
        stash.reset()
        with refused(RuntimeError, "the backward of group 'a', microbatch 0 came as entry 2", "microbatch 1"):
            step(0, 1)
        stash.reset()
        step(1, 0)
        assert stash.verdict(wait=True).ok


def test_a_handle_that_was_reloaded_and_kept_gives_its_pages_back(device):
    with made(device) as stash:
        handle = stash.stash("a", [filled(50, 16, torch.uint8, device)], count(20, device))
        stash.reload(handle, keep=True)
        assert report(stash)["device_in_use"] == 2
        del handle
        gc.collect()
        assert report(stash)["device_in_use"] == 0
