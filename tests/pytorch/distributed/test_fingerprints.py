# Ranks over NCCL that disagree raise an error, and no rank waits for an answer (csrc/distributed/fingerprints.h): the
# rings alone on CPUs, and modules on two GPUs. Mutants: `all` that is not mixed with what came before, a ring that is
# compared before its rank has met this one, or after a capture, a post that a fork's child makes too.
import pytest
from ranks import on_ranks, ranks_compare

from . import fingerprint_workers as workers

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found():
    return {worker.__name__: on_ranks(worker, device="cpu") for worker in workers.WORKERS}


def test_equal_calls_are_let_be(found):
    assert found["equal"] == [(["nothing"] * 2, ["ValueError"] * 2)] * 2


@pytest.mark.parametrize("what", ["sizes", "dtype", "op", "how", "raised"])
def test_all_ranks_raise_a_difference(found, what):
    one, other = (rank[what] for rank in found["different"])
    assert one == other and one.startswith("ValueError: the ranks of the process group '"), (one, other)
    second = {
        "sizes": "rank 1 passes Float [4, 9] to group_gather",
        "dtype": "rank 1 passes Int [4, 8] to group_gather",
        "op": "rank 1 passes Float [4, 8] to group_sum",
        "how": "rank 1 passes Float [4, 8] to group_gather",
        "raised": "rank 1 does not join: its call of group_gather has raised an error there",
    }[what]
    assert f"call different things: rank 0 passes Float [4, 8] to group_gather, {second}" in one, one
    assert "make a new group" in one
    for rank in found["different"]:
        assert rank[f"{what}, the next call"] == one


def test_a_difference_older_than_the_ring_is_raised(found):
    for words in found["long_ago"]:
        assert words.startswith("ValueError: the ranks of the process group") and "after a call that differed" in words


def test_calls_after_a_capture_are_not_compared(found):
    assert found["captured"] == ["nothing"] * 2


def test_an_earlier_group_of_the_name_is_not_compared(found):
    assert found["made_again"] == [["nothing", "nothing"]] * 2


def test_a_child_of_a_rank_posts_nothing(found):
    assert found["forked"] == [("nothing", "ValueError")] * 2


def test_a_post_costs_little(found):
    """Issue: 2 us of host. From Python, by the group's name, on a loaded machine: 20."""
    assert max(found["cost"]) < 20, found["cost"]


@pytest.mark.skipif(ranks_compare(), reason="of NCCL, which two CUDA devices have")
def test_modules_that_disagree_over_nccl():
    one, other = on_ranks(workers.over_nccl)
    for what, (words, before, works, seconds) in one.items():
        its_words, its_before, its_works, its_seconds = other[what]
        assert works and its_works, (what, before, its_before)
        for each in (words, its_words):
            assert each.startswith("ValueError: the ranks of the process group '"), (what, each, before, its_before)
        assert max(seconds, its_seconds) < 15, (what, seconds, its_seconds)
