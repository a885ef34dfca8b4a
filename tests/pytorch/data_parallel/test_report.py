"""te.memory_plan of a wrapper has its buffers and the states of its optimizer: the bytes of the storages, and those of
the law. A timeline has each collective, and how long it was waited for."""

import pytest
from ranks import on_ranks

from . import report_workers as workers

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[1, 2])
def memory(request):
    return on_ranks(workers.memory, ranks=request.param)


@pytest.mark.parametrize("name", workers.LAWS)
def test_rows_are_the_storages_and_the_law(memory, name):
    for rows, storages, law, _ in (rank[name] for rank in memory):
        total = sum(rows.values())
        weights = 1 + 2 * workers.PITCHED if "off 16" in name else 2
        assert rows["gradient"] == pytest.approx(4, rel=0.01) and rows["parameter"] == pytest.approx(weights, rel=0.01)
        assert total == pytest.approx(storages, rel=0.01)
        assert total == pytest.approx(law, rel=0.01)


def test_the_first_memory_of_weights_is_freed(memory):
    for rank in memory:
        assert {name: alive for name, (*_, alive) in rank.items()} == {
            name: name == "unsharded" for name in workers.LAWS
        }


def test_a_timeline_has_each_collective():
    for first, plain, late, shown, groups in on_ranks(workers.times):
        assert not first
        for rows in (plain, late):
            assert {row[:2] for row in rows} == {(i, kind) for i in range(groups) for kind in ("reduce", "gather")}
            for *_, dispatch, start, end, exposed in rows:
                assert dispatch >= 0 and 0 <= exposed <= end - start
            assert [row[2] for row in rows] == sorted(row[2] for row in rows)
        assert shown.count("reduce") == shown.count("gather") == groups


def test_a_late_rank_is_seen_as_exposed_time_of_the_other():
    (_, _, late, *_), _ = on_ranks(workers.times)
    assert sum(row[-1] for row in late if row[1] == "reduce") >= 500  # of 1000 ms
