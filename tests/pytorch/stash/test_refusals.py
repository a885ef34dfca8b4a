# Uses that a stash refuses: each has an outcome with a name, the step after it is whole, and nothing is ever silently
# another value.
import gc
import math

import pytest
import torch
from support import randn, refused

from transformer_engine.pytorch import saved as door
from transformer_engine.pytorch.stash import PagedStash

from .cases import LIVE, ROWS, WIDTH, Whole, count, filled, given, made, same, step


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_bytes": 0}, ["'page_bytes'", "0", "multiple of 128"]),
        ({"page_bytes": 100}, ["'page_bytes'", "100", "multiple of 128"]),
        ({"page_bytes": 128.0}, ["'page_bytes'", "128.0"]),
        ({"page_bytes": True}, ["'page_bytes'", "True"]),
        ({"device_pages": -1}, ["'device_pages'", "-1"]),
        ({"host_pages": None}, ["'host_pages'", "None"]),
        ({"factor": "a lot"}, ["'factor'", "a lot"]),
        ({"factor": math.nan}, ["'factor'", "nan"]),
        ({"factor": 0}, ["'factor'", "0"]),
        ({"policy": "lifo"}, ["'policy'", "lifo", "ring"]),
        ({"policy": []}, ["'policy'", "[]", "ring"]),
        ({"overflow": "ignore"}, ["'overflow'", "ignore", "trap"]),
        ({"sm_budget": 0}, ["'sm_budget'", "0"]),
        ({"low_water": 4}, ["'low_water'", "4", "host pages"]),
        ({"low_water": 4, "host_pages": 8, "policy": "bump"}, ["'low_water'", "bump"]),
        ({"debug": 1}, ["'debug'", "1"]),
        ({"device": "meta"}, ["'device'", "meta", "CPU or CUDA"]),
    ],
    ids=str,
)
def test_options(options, words):
    with refused(ValueError, "PagedStash", *words):
        PagedStash(**{"device": "cpu", **options})


def test_arguments_of_handles(device):
    with made(device) as stash:
        whole, t, one = Whole(stash, device), filled(12, 8, torch.uint8, device), count(3, device)
        for wrong in (None, t, [], {}):
            with refused(TypeError, "PagedStash.stash", "'tensors'", "list of tensors"):
                stash.stash("a", wrong, one)
        with refused(ValueError, "'tensors'", "17", "16"):
            stash.stash("a", [t] * 17, one)
        with refused(TypeError, "'tensors'[1]", "int", "plain torch.Tensor"):
            stash.stash("a", [t, 3], one)
        for wrong in (t.T, t[:, 1:], t[::2], t[0, 0]):
            with refused(ValueError, "'tensors'[0]", list(wrong.shape), "contiguous"):
                stash.stash("a", [wrong], one)
        for wrong in (0, -1, 2.0, True):
            with refused(ValueError, "'unit_rows'", repr(wrong)):
                stash.stash("a", [t], one, unit_rows=wrong)
        with refused(ValueError, "12 rows", "'unit_rows'", "5"):
            stash.stash("a", [t], one, unit_rows=5)
        with refused(ValueError, "'counts'", "1 counters for 2 tensors"):
            stash.stash("a", [t, t], [one])
        for wrong in (3, [3]):
            with refused(TypeError, "PagedStash.stash", "'counts'", "wanted a tensor"):
                stash.stash("a", [t], wrong)
        for wrong in (one.float(), torch.zeros(2, dtype=torch.int32, device=device), one.bool()):
            with refused(ValueError, "'counts'", "one integer"):
                stash.stash("a", [t], wrong)
        with refused(ValueError, "'tail'", "ones", "zero"):
            stash.stash("a", [t], one, tail="ones")
        elsewhere = torch.empty(12, 8, device="meta")
        with refused(ValueError, "'tensors'[0]", "meta", "the pool's device"):
            stash.stash("a", [elsewhere], one)
        with refused(ValueError, "'counts'", "meta"):
            stash.stash("a", [t], one.to("meta"))
        for wrong in (None, 3, t):
            with refused(TypeError, "PagedStash.reload", "'handle'", "stash()"):
                stash.reload(wrong)
        with made(device) as other:
            handle = other.stash("a", [t], one)
            with refused(RuntimeError, "'a'", "pages are gone"):
                stash.reload(handle)
            assert torch.equal(other.reload(handle)[0][:3], t[:3])
        whole()


def test_reloads_that_come_too_late(device):
    with made(device) as stash:
        whole, t = Whole(stash, device), filled(12, 8, torch.uint8, device)
        handle = stash.stash("a", [t], count(3, device))
        stash.reload(handle)
        with refused(RuntimeError, "'a'", "reload()", "pages are gone"):
            stash.reload(handle)
        handle = stash.stash("late", [t], count(3, device))
        stash.reset()
        with refused(RuntimeError, "'late'", "pages are gone"):
            stash.reload(handle)
        whole()


def test_a_backward_that_comes_too_late(device):
    """Its pages belong to another step by then, and its entries to no schedule."""
    with made(device) as stash:
        whole = Whole(stash, device)
        whole(), whole()
        stash.reset()
        x = whole.x.clone().requires_grad_()
        y = whole.module(x, whole.counter, stash)
        with pytest.warns(UserWarning, match="ended before the backward of group 2"):
            stash.reset(record=True)
        with refused(RuntimeError, "group 1", "the backward", "pages are gone"):
            y.sum().backward()
        del y
        gc.collect()
        assert not stash.schedule.entries
        found, _ = step(whole.module, [whole.x], [whole.counter], stash)
        same(found, whole.expected)
        whole(), whole()


def test_groups(device):
    with made(device) as stash:
        whole, x, one = Whole(stash, device), given(device).requires_grad_(), count(LIVE, device)
        with refused(TypeError, "PagedStash.group", "'counts'", "int"):
            stash.group("a", 3)
        with refused(ValueError, "PagedStash.group", "'tail'", "wide"):
            stash.group("a", one, tail="wide")
        for call in (lambda: stash.group(["a"], one), lambda: stash.stash({}, [x], one)):
            with refused(TypeError, "PagedStash.", "the group's name", "hashed"):
                call()
        for call in ("pre_schedule", "post_schedule"):
            with refused(TypeError, f"PagedStash.{call}", "tuple", "tensor"):
                getattr(stash, call)((x,))
        group = stash.group("twice", one)
        with group:
            pass
        with refused(RuntimeError, "'twice'", "entered before"), group:
            pass
        with refused(RuntimeError, "'inner'", "inside of group 'outer'"), stash.group("outer", one):
            with stash.group("inner", one):
                pass
        stash.pre_schedule(x)
        with refused(RuntimeError, "pre_schedule", "called twice"):
            stash.pre_schedule(x)
        with stash.group("a", one):
            whole.module.layers[0](x)
        with refused(RuntimeError, "'b'", "after group 'a'", "one group"), stash.group("b", one):
            pass
        stash.reset()
        with refused(RuntimeError, "post_schedule", "no group was closed"):
            stash.post_schedule(x)
        whole(record=True)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_what_cannot_come_back_as_it_was(device):
    """Tensors of one storage with different counters, or without one."""
    with made(device) as stash:
        whole, x = Whole(stash, device), randn(64, 8, device=device).requires_grad_()
        a, b = count(10, device), count(20, device)

        def kept(*parts):
            t = x * 1
            with stash.group("a"):
                return [f(part(t)) for part, f in zip(parts, (torch.sin, torch.cos), strict=True)]

        def said(rows, counter):
            def part(t):
                door.mark_pageable(t[rows], counter)
                return t[rows]

            return part

        everything, half, second, middle = slice(None), slice(32), slice(32, 64), slice(16, 48)
        for first, then in ((everything, second), (everything, middle)):
            for counter in (a, b):
                with refused(ValueError, "'a'", "inside another tensor", "live rows of the two differ"):
                    kept(said(first, a), said(then, counter))
        with refused(ValueError, "'a'", "inside another tensor"):
            kept(said(everything, a), said(half, b))
        for first, then in ((second, everything), (half, middle)):
            with refused(ValueError, "'a'", "shares a part"):
                kept(said(first, a), said(then, a))
        with refused(ValueError, "'a'", "not in its rows", "mark_pageable"):
            kept(said(half, a), lambda t: t[second])
        for dtype in (torch.int8, torch.int32):  # these are restored
            counter = a.to(dtype)
            y, z = kept(said(everything, counter), said(half, counter))
            stash.step.free_leaving()
            (g,) = torch.autograd.grad(y.sum() + z.sum(), x)
            wanted = x.cos()
            wanted[:32] -= x[:32].sin()
            same([g[:10].detach()], [wanted[:10].detach()])
        whole()


def test_tensors_of_two_row_counts(device):
    with made(device) as stash:
        whole, one = Whole(stash, device), count(LIVE, device)
        with refused(ValueError, "'a'", "24 rows and of 8", "one number of rows"), stash.group("a", one):
            for rows in (ROWS, 8):
                whole.module.layers[0](randn(rows, WIDTH, device=device, requires_grad=True))
        whole()


def test_more_than_sixteen_tensors(device):
    with made(device) as stash:
        whole, x, one = Whole(stash, device), randn(8, 4, device=device, requires_grad=True), count(3, device)
        with refused(ValueError, "'a'", "more than 16", "second group"), stash.group("a"):
            for _ in range(17):
                y = x * 1
                door.mark_pageable(y, one)
                y.sin()
        whole()


@pytest.mark.parametrize("value", [-5, 100])
def test_counts_out_of_range(value, device):
    """It is cut and reported: all existing rows are loaded."""
    with made(device) as stash:
        whole, t = Whole(stash, device), filled(12, 8, torch.uint8, device)
        expected = t.clone() if value > 0 else torch.zeros_like(t)
        handle = stash.stash("a", [t], count(value, device))
        t.zero_()
        same(stash.reload(handle), [expected])
        verdict = stash.verdict(wait=True)
        assert verdict.flags == (("over capacity",) if value > 0 else ("negative count",)) and verdict.group == "a"
        assert "'a'" in str(verdict) and float(stash.gate()) == 1
        whole()


def test_a_stash_inside_of_a_backward(device):
    with made(device) as stash:
        whole, x, t = (
            Whole(stash, device),
            randn(4, device=device, requires_grad=True),
            filled(4, 4, torch.uint8, device),
        )
        y = x * 1
        y.register_hook(lambda g: stash.stash("a", [t], count(2, device)) and None)
        with refused(RuntimeError, "PagedStash.stash", "inside of a backward"):
            y.sum().backward()
        whole()


def test_a_counter_that_is_written_while_its_group_leaves(device):
    with made(device) as stash:
        whole, x, one = Whole(stash, device), given(device).requires_grad_(), count(LIVE, device)
        z = stash.pre_schedule(x)
        with stash.group("a", one):
            z = whole.module.layers[0](z)
        z = stash.post_schedule(z)
        one.add_(1)
        with refused(RuntimeError, "counter", "'a'", "changed in place"):
            stash.pre_schedule(z)
        with refused(RuntimeError, "counter", "'a'", "changed in place"):
            z.sum().backward()
        del z
        whole(record=True)


@pytest.mark.parametrize("when", ["in the group", "leaving", "away"])
def test_writes_in_place(when, device):
    """A write after the copy is harmless; a write before it raises, as in torch."""
    with made(device) as stash:
        whole, x, one = Whole(stash, device), given(device).requires_grad_(), count(ROWS, device)
        t = x * 1
        door.mark_pageable(t, one)
        with stash.group("a"):
            y = t.sin()
            if when == "in the group":
                t.mul_(2)
        if when == "leaving":
            t.mul_(2)
        stash.step.free_leaving()
        if when == "away":
            t.mul_(2)
            y.sum().backward()
            same([x.grad], [x.detach().cos()])
        else:
            with refused(RuntimeError, "is at version 1", "saved at version 0"):
                y.sum().backward()
        del y, t
        whole()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_a_short_counter_is_read_when_its_tensor_is_saved(dtype, device):
    """The engine reads an int32 copy, one for each value."""
    counter = torch.tensor([2], dtype=dtype, device=device)
    weights = [torch.ones(8, 64, device=device, requires_grad=True) for _ in range(2)]
    with made(device) as stash:
        with stash.group("a"):
            results = []
            for live, weight in zip((2, 6), weights, strict=True):
                counter.fill_(live)
                t = torch.ones(8, 64, device=device)
                door.mark_pageable(t, counter)
                results.append(weight * t)
                del t
        with stash.group("b"):
            pass
        sum(results).sum().backward()
        for live, weight in zip((2, 6), weights, strict=True):
            assert weight.grad[:, 0].tolist() == [1.0] * live + [0.0] * (8 - live)


def test_a_group_that_torch_takes_no_hooks_for(device):
    with made(device) as stash:
        none, one = torch.autograd.graph.disable_saved_tensors_hooks("none here"), count(3, device)
        with none, pytest.raises(RuntimeError, match="none here"), stash.group("a", one):
            pass
        Whole(stash, device)(record=True)
