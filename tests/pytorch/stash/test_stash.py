# Handles: tensors go into pages by their live rows and come back bit for bit, whatever they are and however many of
# their rows are alive. The bytes taken are asserted to be the live ones, and the originals are overwritten before the
# reload. Mutants: originals that are held instead of copied (no clone() in csrc/stash/stash_api.cpp before there is a
# pool), a count that is ignored (unit_rows left out of stash_member_of()): each turns tests red.
import copy
import gc
import weakref

import pytest
import torch
from support import refused

from .cases import count, filled, made, pinned_bytes, report, same, scribble

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
COUNTS = [0, 1, 63, 64, 65, 127, 128, 200]


def there_and_back(stash, tensors, counters, **how):
    expected = [t.clone() for t in tensors]
    handle = stash.stash("a", tensors, counters, **how)
    scribble(*tensors)
    return stash.reload(handle), expected


@pytest.mark.parametrize("live", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip(dtype, live, device):
    with made(device) as stash:
        t = filled(200, 24, dtype, device)
        (back,), (expected,) = there_and_back(stash, [t], count(live, device))
        expected[live:].view(torch.uint8).zero_()
        same([back], [expected])
        assert back.data_ptr() != t.data_ptr()
        found = report(stash)
        assert found["live_bytes"] == live * 24 and found["groups"] == 1 and found["flags"] == 0
        assert found["device_in_use"] == 0 and found["device_peak"] == -(-live * 24 // 256)


@pytest.mark.parametrize("row_bytes", [4, 12, 16, 20, 124, 128, 132, 1000, 4096, 7168, 28672])
@pytest.mark.parametrize("page_bytes", [128, 384, 32768])
def test_rows_of_any_size(row_bytes, page_bytes, device):
    with made(device, page_bytes=page_bytes, device_pages=3 + 17 * 28672 // page_bytes) as stash:
        for live in (1, 17):
            t = filled(17, row_bytes, torch.float32, device, seed=live)
            (back,), (expected,) = there_and_back(stash, [t], count(live, device))
            expected[live:].view(torch.uint8).zero_()
            same([back], [expected])
        assert report(stash)["live_bytes"] == 18 * row_bytes


@pytest.mark.parametrize("live", [0, 1, 2, 3])
def test_panels(live, device):
    with made(device) as stash:
        panels, rows = filled(3 * 128, 28, torch.uint8, device), filled(9, 64, torch.bfloat16, device)
        (back,), (expected,) = there_and_back(stash, [panels], count(live, device), unit_rows=128)
        expected[128 * live :] = 0
        same([back], [expected])
        (back,), (expected,) = there_and_back(stash, [rows], count(live, device), unit_rows=3)
        expected[3 * live :] = 0
        same([back], [expected])
        assert report(stash)["live_bytes"] == live * (128 * 28 + 3 * 64)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_counters_of_every_kind(dtype, device):
    with made(device) as stash:
        t = filled(256, 8, torch.uint8, device)
        for counter in (count(200, device, dtype), torch.tensor(200, dtype=dtype, device=device)):
            (back,), (expected,) = there_and_back(stash, [t], counter)
            expected[200:] = 0
            same([back], [expected])


def test_sixteen_members_of_every_kind(device):
    with made(device) as stash:
        tensors = [
            filled(1 + 13 * i, 4 * (i + 1), DTYPES[i % 4] if i != 7 else torch.int64, device, seed=i)
            if i != 3
            else torch.empty(0, 8, device=device)
            for i in range(16)
        ]
        live = [min(len(t), 11 * i) for i, t in enumerate(tensors)]
        counters = [count(n, device, torch.int64 if i % 2 else torch.int32) for i, n in enumerate(live)]
        back, expected = there_and_back(stash, tensors, counters)
        for t, n in zip(expected, live, strict=True):
            t[n:].view(torch.uint8).zero_()
        same(back, expected)
        assert report(stash)["live_bytes"] == sum(t[:n].nbytes for t, n in zip(tensors, live, strict=True))


def test_views_at_an_offset(device):
    """Neighbours in their storage are neither read nor held."""
    whole = filled(60, 20, torch.uint8, device).flatten()
    views = [whole[3:103].view(10, 10), whole[201:211], whole[400:1000].view(5, 3, 40)]
    wanted = whole.clone()
    with made(device) as stash:
        handle = stash.stash("a", views, [count(n, device) for n in (4, 10, 2)])
        ref = weakref.ref(whole.untyped_storage())
        scribble(whole)
        del whole, views
        gc.collect()
        assert ref() is None
        a, b, c = stash.reload(handle)
        same([a[:4].flatten(), b, c[:2].flatten()], [wanted[3:43], wanted[201:211], wanted[400:640]])
        assert not (a[4:].any() or c[2:].any()) and [t.shape for t in (a, b, c)] == [(10, 10), (10,), (5, 3, 40)]
        assert report(stash)["live_bytes"] == 40 + 10 + 240


@pytest.mark.parametrize("live", [0, 3, 128, 130, 300])
@pytest.mark.parametrize("tail", ["zero", "tile", "keep"])
def test_tails(tail, live, device):
    """Dead rows are written as far as the tail reaches; before, the memory is NaN or 0xFF."""
    with made(device) as stash:
        t = filled(300, 8, torch.uint8, device)
        (back,), (expected,) = there_and_back(stash, [t], count(live, device), tail=tail)
        end = {"zero": 300, "tile": min(300, -(-live // 128) * 128), "keep": live}[tail]
        assert torch.equal(back[:live], expected[:live])
        assert not back[live:end].any()
        assert (back[end:] == 0xFF).all()


def test_reloads_that_keep(device):
    with made(device) as stash:
        t, counter = filled(50, 16, torch.float32, device), count(20, device)
        expected = t.clone()
        expected[20:] = 0
        handle = stash.stash("a", [t], counter)
        scribble(t)
        first = stash.reload(handle, keep=True)[0]
        second = stash.reload(handle, keep=True)[0]
        same([first, second], [expected, expected])
        first.fill_(1)
        assert stash.step.stash is stash and report(stash)["device_in_use"] == 2
        third = stash.reload(handle)[0]
        same([second, third], [expected, expected])
        assert report(stash)["device_in_use"] == 0
        with refused(RuntimeError, "'a'", "reload()", "pages are gone", "keep=True"):
            stash.reload(handle)
        assert stash.verdict(wait=True).ok


def test_before_there_is_a_pool(device):
    """The first step keeps all tensors, but a write to the originals does not change a reload."""
    with made(device, device_pages=None, page_bytes=128) as stash:
        for tail in ("zero", "keep"):
            t, counter = filled(50, 16, torch.uint8, device), count(20, device)
            expected = t.clone()
            handle = stash.stash("a", [t], counter, tail=tail)
            scribble(t)
            kept = stash.reload(handle, keep=True)[0]
            same([kept[:20]], [expected[:20]])
            assert tail == "keep" or not kept[20:].any()
            kept.fill_(7)
            again = stash.reload(handle)[0]
            same([again[:20]], [expected[:20]])
            with refused(RuntimeError, "pages are gone"):
                stash.reload(handle)
        stash.reset()
        (back,), (expected,) = there_and_back(stash, [filled(50, 16, torch.uint8, device)], count(20, device))
        same([back[:20]], [expected[:20]])
        assert report(stash)["live_bytes"] == 320


def test_tensors_without_rows(device):
    with made(device) as stash:
        tensors = [
            torch.empty(0, 8, device=device),
            torch.empty(5, 0, device=device),
            filled(5, 4, torch.int32, device),
        ]
        handle = stash.stash("a", tensors, count(2, device))
        back = stash.reload(handle)
        assert [t.shape for t in back] == [t.shape for t in tensors]
        handle = stash.stash("b", tensors[:1], count(0, device))
        assert stash.reload(handle)[0].shape == (0, 8)
        found = stash.verdict(wait=True)
        assert found.report["live_bytes"] == 8


@pytest.mark.parametrize("policy", ["ring", "stack"])
def test_pages_of_both_tiers_and_in_any_order(policy, device):
    """Device pages first, host pages for the rest; the order of loads permutes both lists."""
    with made(device, device_pages=6, host_pages=6, page_bytes=128, policy=policy) as stash:
        for turn in range(7):
            tensors = [filled(8, 64, torch.uint8, device, seed=10 * turn + i) for i in range(3)]
            expected = [t.clone() for t in tensors]
            handles = [stash.stash(i, [t], count(8, device)) for i, t in enumerate(tensors)]
            scribble(*tensors)
            found = report(stash)
            assert (found["device_in_use"], found["host_in_use"]) == (6, 6)
            for i in ((1, 0, 2), (2, 1, 0), (0, 2, 1))[turn % 3]:
                same(stash.reload(handles[i]), [expected[i]])
        found = report(stash)
        assert found["spilled_bytes"] == 7 * 6 * 128 and found["flags"] == 0 and found["live_bytes"] == 7 * 3 * 512


def test_a_lost_group_is_nan(device):
    with made(device, device_pages=2, page_bytes=128) as stash:
        t = filled(16, 64, torch.bfloat16, device)
        fits = stash.stash("fits", [t[:4].clone()], count(4, device))
        lost = stash.stash("lost", [t], count(11, device))
        assert float(stash.gate()) == 1 and stash.gate().dtype is torch.float32
        back = stash.reload(lost)[0]
        assert back[:11].isnan().all() and not back[11:].any()
        same(stash.reload(fits), [t[:4]])
        verdict = stash.verdict(wait=True)
        assert verdict.flags == ("lost",) and verdict.group == "lost" and verdict.step == 0
        assert verdict.report["lost_groups"] == 1 and verdict.report["live_bytes"] == 256
        assert verdict.report["demand"] == 2 + 6
        stash.reset()
        assert float(stash.gate()) == 0
        assert stash.verdict().group == "lost" and stash.verdict() is None
        assert stash.verdict(wait=True).ok


def test_a_dropped_handle_gives_its_pages_back(device):
    with made(device, debug=True) as stash:
        handle = stash.stash("a", [filled(50, 16, torch.uint8, device)], count(20, device))
        assert report(stash)["device_in_use"] == 2
        del handle
        gc.collect()
        assert report(stash)["device_in_use"] == 0
        stash.reset()
        assert stash.verdict(wait=True).ok


def test_what_a_pool_takes_beside_its_pages(device):
    """At most a thousandth: lists of ids, the report, and an entry of page ids for each group."""
    page_bytes, pages = 524288, 64
    with made(device, page_bytes=page_bytes, device_pages=pages) as stash:
        t, counter = torch.zeros(4096, 1024, dtype=torch.uint8, device=device), count(4096, device)
        handles = [stash.stash(i, [t], counter) for i in range(8)]
        assert all(handle.group.most_pages == 8 for handle in handles) and report(stash)["device_in_use"] == pages
        lists = stash._pool.native.bytes - pages * page_bytes
        assert 0 < lists + 8 * (256 + 128) <= pages * page_bytes / 1000


def test_a_copied_model_shares_its_stash(device):
    with made(device) as stash:
        handle = stash.stash("a", [filled(50, 16, torch.uint8, device)], count(20, device))
        assert copy.deepcopy({"stash": stash})["stash"] is stash
        assert stash.reload(handle)[0].shape == (50, 16)


def test_memory_goes_back(device):
    before = pinned_bytes()
    with made(device, close=False, host_pages=64) as stash:
        handle = stash.stash("a", [filled(50, 16, torch.uint8, device)], count(20, device))
        native = stash._pool.native
        assert native.bytes >= 4096 * 256 and pinned_bytes() >= before + 64 * 256
        assert stash.close().ok and stash.close() is None
        gc.collect()
        assert native.bytes == 0 and pinned_bytes() == before
        calls = {
            "reload": lambda: stash.reload(handle),
            "stash": lambda: stash.stash("a", [], count(1, device)),
            "group": lambda: stash.group("a"),
            "plot": lambda: stash.plot("nowhere.csv"),
            "rerun": lambda: stash.rerun(list),
            "pre_schedule": lambda: stash.pre_schedule(torch.ones(1)),
        }
        for name in ("reset", "verdict", "gate", "grow", "plan"):
            calls[name] = getattr(stash, name)
        for name, call in calls.items():
            with refused(RuntimeError, f"PagedStash.{name}:", "is closed", "make another one"):
                call()
