# Captured callables on two ranks: amaxes of delayed scaling are reduced over the group that eager takes, at the same
# places and in the same order.
import pytest
from ranks import on_ranks

from . import workers

pytestmark = pytest.mark.dist


def assert_captured_is_eager(left, what):
    for seed, (captured, eager) in enumerate(left):
        assert captured == eager, f"{what}, step {seed}"


def test_a_call_uses_the_group_of_the_autocast_around_it():
    """Outside of any autocast, where eager does not quantize, the group of the capture."""
    both = on_ranks(workers.groups_of_autocast)
    for rank, found in enumerate(both):
        assert len(found) == 3 * 5 * 2
        for what, left in found.items():
            assert_captured_is_eager(left, f"rank {rank}: captured in {what}")
    for what in both[0]:  # one scale per group; the ranks have different values
        captured, name = what.split(", then ")
        name = name.split(",")[0]
        alone = (captured if name in ("none", "disabled") else name) == "own"
        one, other = (found[what][-1][0] for found in both)
        assert (one != other) == alone, what


def test_groups_of_autocasts_inside():
    both = on_ranks(workers.groups_inside)
    for rank, found in enumerate(both):
        for what, left in found.items():
            assert_captured_is_eager(left, f"rank {rank}: {what}")
    one, other = ({what: left[-1][0] for what, left in found.items()} for found in both)
    assert {what: one[what] == other[what] for what in one} == {
        "inner is own: True": False,
        "inner is own: False": True,
        "two in one region": False,
    }


def test_one_rank_replays_and_the_other_does_not():
    one, other = on_ranks(workers.captured_on_one_rank)
    for left in (one, other):
        assert_captured_is_eager(left, "")
    assert one == other


def test_ranks_that_call_unevenly_over_groups_of_their_own():
    one, other = on_ranks(workers.uneven_calls)
    assert one != other
