# The schedulers' duties one by one, by the log of the work on the streams; pipelines of one rank, recorded and from
# _order, whose peak is the one that the plan replays; and generated orders of forwards and backwards. Mutants: no
# load ahead after a backward, originals that are freed a group later (free_leaving), a handle by its group's name
# alone: each turns tests red.
import pytest
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st
from support import randn

from transformer_engine.pytorch.stash.schedule import Schedule

from .cases import count, made, report, same
from .pipelines import PIPELINES, ROWS, WIDTH, chunks_in_order, layer


def entries(stash, layers):
    return [(e.forward, (e.name[0] - 1) * layers + e.name[1], e.microbatch) for e in stash.schedule.entries]


def logged(stash, order, layers, counters, device):
    stash.streams.log = log = []
    chunks_in_order(order, layers, counters, device, stash, log)
    stash.streams.log = None
    short = []
    for entry in log:
        if isinstance(entry, str):
            short.append(entry.replace("(1, ", "").replace(")", ""))
        else:
            what = entry[2][0] if entry[1] == "wait" else entry[1]
            kind, name = what.split(" ", 1)
            short.append(("wait " if entry[1] == "wait" else "") + kind + name.rstrip(")")[-1])
    return short


def three(device):
    return [count(20, device), count(12, device), count(8, device)]


@pytest.fixture
def known(device):
    """The log of the second step of a stash that has recorded the order of three layers."""
    with made(device) as stash:
        chunks_in_order([1, -1], 3, three(device), device, stash)
        stash.reset()
        yield logged(stash, [1, -1], 3, three(device), device)


WHOLE = "F0 store0 | wait store0 F1 store1 | wait store1 F2 | B2 load1 | wait load1 B1 load0 | wait load0 B0"


def test_a_step_of_three_layers(known):
    assert known == [w for part in WHOLE.split(" | ") for w in split_words(part)]


def split_words(part):
    words, found = part.split(" "), []
    while words:
        word = words.pop(0)
        found.append(f"wait {words.pop(0)}" if word == "wait" else word)
    return found


def test_pre_forward_waits_for_the_stash_before(known):
    assert known.index("store0") < known.index("wait store0") < known.index("F1")


def test_pre_forward_frees_its_originals(device):
    with made(device) as stash:
        x = randn(ROWS, WIDTH, device=device, requires_grad=True)
        y = layer(x, stash, 0, count(20, device), [])
        handle = next(iter(stash.step.handles))
        assert handle.state == "stored" and handle.segments[0].memory is not None
        stash.pre_schedule(y)
        assert handle.state == "away" and handle.segments[0].memory is None


def test_post_forward_stashes(known):
    assert known.index("F0") < known.index("store0") < known.index("F1") < known.index("store1")


def test_post_forward_keeps_what_is_next(known):
    assert "store2" not in known and "load2" not in known


def test_post_forward_loads_ahead(device):
    """The group of the microbatch before, whose backward is next."""
    order = [1, 1, -1, 1, -1, -1]
    with made(device) as stash:
        chunks_in_order(order, 1, three(device), device, stash)
        stash.reset()
        found = logged(stash, order, 1, three(device), device)
        assert found == (
            ["F0", "store0", "wait store0", "F0", "store0", "load0", "wait store0", "wait load0", "B0"]
            + ["F0", "store0", "load0", "wait store0", "wait load0", "B0", "load0", "wait load0", "B0"]
        )


def test_post_backward_waits_for_the_stash_and_frees(device):
    """A backward directly after the forward of another group, whose originals are not freed yet."""
    with made(device) as stash:
        x = randn(ROWS, WIDTH, device=device, requires_grad=True)
        first = layer(x, stash, "a", count(20, device), [])
        layer_out = layer(x, stash, "b", count(20, device), [])
        handle = next(h for h in stash.step.handles if h.name == "b")
        assert handle.state == "stored"
        stash.streams.log = log = []
        first.sum().backward()
        assert ("compute", "wait", ("store b",)) in log and handle.state == "away"
        assert log.index(("compute", "wait", ("store b",))) < log.index(("compute", "wait", ("load a",)))
        stash.streams.log = None
        layer_out.sum().backward()


def test_post_backward_waits_for_the_reload(known):
    assert known.index("load1") < known.index("wait load1") < known.index("B1")
    assert known.index("load0") < known.index("wait load0") < known.index("B0")


def test_pre_backward_loads_ahead(known):
    """The next load starts after the layer's backward, so that two groups are never loaded at once."""
    assert known.index("B2") < known.index("load1") and known.index("B1") < known.index("load0")


def test_pre_backward_loads_nothing_where_a_forward_is_next(device):
    order = [1, 1, -1, 1, -1, -1]
    with made(device) as stash:
        chunks_in_order(order, 2, three(device), device, stash)
        stash.reset()
        found = logged(stash, order, 2, three(device), device)
        last = len(found) - 1 - found[::-1].index("F0")
        assert found[last - 1] == "B0" and "load" not in found[last - 1]


def test_entries_are_noted_in_the_first_step(device):
    with made(device) as stash:
        chunks_in_order([1, -1], 2, three(device), device, stash)
        wanted = [(True, 0, 0), (True, 1, 0), (False, 1, 0), (False, 0, 0)]
        assert entries(stash, 2) == wanted and not stash.schedule.known
        stash.reset()
        assert entries(stash, 2) == wanted and stash.schedule.known
        chunks_in_order([1, -1], 2, three(device), device, stash)
        assert entries(stash, 2) == wanted and stash.schedule.position == 4


@pytest.mark.parametrize("policy", ["ring", "stack"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines(pipeline, policy, device):
    order, layers = PIPELINES[pipeline]
    chunks = max(order)
    counters = [count(4 + 5 * i % 23, device) for i in range(chunks * layers)]
    expected = chunks_in_order(order, layers, counters, device)
    told = Schedule(order, layers)
    with made(device, policy=policy) as stash, made(device, policy=policy) as asked:
        same(chunks_in_order(order, layers, counters, device, stash), expected)
        assert entries(stash, layers) == [tuple(e) for e in told.entries]
        asked.schedule_from_order(order, layers)
        same(chunks_in_order(order, layers, counters, device, asked), expected)
        stash.reset()
        same(chunks_in_order(order, layers, counters, device, stash), expected)
        one, other = report(stash), report(asked)
        assert one["device_peak"] == other["device_peak"] == stash.plan().peak_pages
        assert one["flags"] == 0 and one["device_in_use"] == 0 and one["groups"] == other["groups"] > 0
        assert one["live_bytes"] == other["live_bytes"]
    with made(device, device_pages=None, factor=1.0, policy=policy) as tight:
        for _ in range(3):
            same(chunks_in_order(order, layers, counters, device, tight), expected)
            if tight._pool is not None:
                numbers = report(tight)
                assert numbers["flags"] == 0 and numbers["device_peak"] == tight.plan().device_pages
            tight.reset()


@pytest.mark.parametrize("scheduled", [True, False])
def test_the_peak_of_groups_of_10_10_and_4_pages(scheduled, device):
    """40, 40 and 16 rows of 64 bytes, 4 rows a page, and a last layer that stays."""
    counters = [count(40, device), count(38, device), count(16, device), count(1, device)]

    def run(stash):
        y = randn(40, WIDTH, device=device, requires_grad=True)
        for i, counter in enumerate(counters[: 4 if scheduled else 3]):
            y = layer(y, stash, i, counter, [], scheduled)
        y.sum().backward()

    with made(device, device_pages=None, factor=1.0) as stash:
        run(stash)
        stash.reset()
        run(stash)
        plan = stash.plan()
        assert plan.peak_pages == plan.device_pages == report(stash)["device_peak"] == 24
        assert plan.live_bytes == (40 + 38 + 16) * 64 and stash.plan(worst=True).peak_pages == 30
        assert [(kind, pages) for kind, _, pages in plan.occupancy] == (
            [("store", 10), ("store", 20), ("store", 24), ("load", 20), ("load", 10), ("load", 0)]
        )


def test_microbatches_one_behind_the_other_want_one_pool(device):
    """Without schedulers and before there is a pool, loads are recorded."""
    with made(device, device_pages=None, factor=1.0) as stash:
        for _ in range(5):
            chunks_in_order([1, -1], 2, three(device), device, stash, scheduled=False)
        stash.reset()
        assert stash.plan().peak_pages == 5 + 3


@generated(
    st.lists(st.sampled_from([1, 1, 2, 2, -1, -1, -2, -2, 0]), min_size=1, max_size=12),
    st.lists(st.integers(0, ROWS), min_size=4, max_size=4),
    st.sampled_from([("ring", 4096, 0, 0), ("stack", 4096, 0, 0), ("ring", 9, 500, 0), ("stack", 9, 500, 0)])
    | st.sampled_from([("ring", 24, 500, 12), ("stack", 24, 500, 12), ("ring", 0, 500, 0)]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_orders(order, live, pool, scheduled):
    """Of two chunks of two layers, some of whose graphs are dropped, over three steps: the gradients are those of a run
    without, and every page comes back."""
    policy, device_pages, host_pages, low_water = pool
    flying, program = [], []
    for entry in order:  # only backwards of chunks in flight
        if entry > 0:
            flying.append(entry)
        elif entry == 0 and flying:
            flying.pop(0)
        elif -entry in flying:
            flying.remove(-entry)
        else:
            continue
        program.append(entry)
    program = program or [1, -1]
    device, counters = "cpu", [count(n, "cpu") for n in live]
    expected = chunks_in_order(program, 2, counters, device)
    options = {"policy": policy, "device_pages": device_pages, "host_pages": host_pages, "low_water": low_water}
    with made(device, debug=True, **options) as stash:
        for _ in range(3):
            same(chunks_in_order(program, 2, counters, device, stash, scheduled=scheduled), expected)
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
            stash.reset()


def test_a_handle_after_a_group_does_not_keep_its_originals(device):
    with made(device) as stash:
        y = layer(randn(ROWS, WIDTH, device=device, requires_grad=True), stash, "a", count(20, device), [])
        group = next(h for h in stash.step.handles if h.name == "a")
        handle = stash.stash("b", [randn(ROWS, WIDTH, device=device)], count(20, device))
        assert group.state == handle.state == "away" and group.segments[0].memory is None
        y.sum().backward()
