# The gate of several ranks: one of them lost a group, all of them skip the step.
import pytest
import rank_workers
from ranks import on_ranks

pytestmark = pytest.mark.dist


def test_a_group_that_one_rank_lost_is_every_ranks(device):
    without, with_one = on_ranks(rank_workers.stash_gates, device=device)
    assert without == [(0.0, 1.0, 0), (0.0, 0.0, 0)]
    assert with_one == [(1.0, 1.0, 0), (0.0, 0.0, 0)]


def test_mixtures_of_two_ranks(device):
    """A group that rank 1 lost keeps both ranks from the step; repeated in a larger pool, both take it."""
    rank0, rank1 = on_ranks(rank_workers.mixtures_with_a_stash, device=device)
    assert rank0 == [(1.0, False, True, True), (0.0, True, True, True)]
    assert rank1 == [(1.0, False, False, False), (0.0, True, True, True)]
