# Channels to peers while groups come and go, and where memory cannot be shared: nothing is left behind, no module goes
# on over the channel of a group that is gone, and all ranks hear of one's trouble. Mutants, in distributed/peer.py and
# module/parallel.py: a channel that holds its meeting, an exchange that is not looked at again, a rank that raises
# without telling, turn these red.
import time

import peer_group_workers as workers
import pytest
from ranks import as_peers, on_cuda

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(on_cuda(), reason="what the CPU's shared memory leaves behind"),
]


def test_groups_that_come_and_go_leave_nothing():
    for found in as_peers(workers.groups_that_come_and_go):
        assert all(mapped > 0 for (_, mapped), _ in found), found
        left = [behind for _, behind in found]
        assert left[1] == left[0] == left[2] and left[0][1] == 0, found


@pytest.mark.parametrize("holds", [False, True])
def test_a_module_follows_its_group(tmp_path, holds):
    """Mutant: has_met() by the name alone, where somebody holds the first group."""
    for words, wrong in as_peers(workers.another_group_of_the_name, str(tmp_path), holds):
        assert len(words) == 2 and "has failed" in words[0] and "destroyed" in words[1], words
        assert not wrong


@pytest.mark.parametrize("when", [1, 2])
def test_a_rank_without_space_tells_the_others(when):
    before = time.monotonic()
    for words, left in as_peers(workers.no_space, when):
        assert "rank 0 got" in words and "No space left" in words, words
        assert not left
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("overlap", ["chunked", "auto"])
def test_all_ranks_refuse_where_one_has_no_access(overlap):
    """Mutant: a rank that refuses for itself (distributed/peer.py)."""
    for words, wrong in as_peers(workers.no_access, overlap):
        assert ("rank 1 sees no other" in words) == (overlap == "chunked"), words
        assert not wrong


def test_a_group_that_is_collected_while_another_one_meets():
    """Mutant: a key that is looked up behind has_met() (distributed/peer.py)."""
    for wrong in as_peers(workers.collected_meanwhile):
        assert not wrong
