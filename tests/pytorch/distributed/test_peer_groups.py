# Channels to peers while groups come and go, and where memory cannot be shared: nothing is left behind, no module goes
# on over the channel of a destroyed group, and an error of one rank is raised on all. Mutants, in distributed/peer.py
# and module/parallel.py: a channel that holds its meeting, a TPComm that is not looked at again, a rank that raises
# without telling, turn these red.
import time

import pytest
from ranks import as_peers, on_cuda

from . import peer_group_workers as workers

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(on_cuda(), reason="what the CPU's shared memory leaves behind"),
]


def test_groups_that_come_and_go_leave_nothing():
    """Mutants: meetings that are kept, descriptors that stay open."""
    for found in as_peers(workers.groups_that_come_and_go):
        for (maps, descriptors), left, threads in found:
            assert maps > 1 and descriptors == 0, found
            assert left == (0, 0) and threads == found[0][2], found


@pytest.mark.parametrize("holds", [False, True])
def test_a_module_follows_its_group(tmp_path, holds):
    for words, wrong in as_peers(workers.another_group_of_the_name, str(tmp_path), holds):
        assert len(words) == 2 and "has failed" in words[0] and "destroyed" in words[1], words
        assert not wrong


@pytest.mark.parametrize("when", [1, 2])
def test_one_rank_without_space_is_an_error_on_all(when):
    before = time.monotonic()
    for words, (failed, sound, left) in as_peers(workers.no_space, when):
        assert "rank 0 got" in words and "No space left" in words, words
        assert failed == (when - 1, 0), "the words of the channel alone, where there is one"
        assert sound[0] > 1 and sound[1] == 0 and left == (0, 0), (sound, left)
    assert time.monotonic() - before < 240  # the group's timeout is 30 minutes


@pytest.mark.parametrize("overlap", ["chunked", "auto"])
def test_all_ranks_refuse_where_one_has_no_access(overlap):
    for words, wrong in as_peers(workers.no_access, overlap):
        assert ("rank 1 sees no other" in words) == (overlap == "chunked"), words
        assert not wrong


def test_a_group_that_is_collected_while_another_one_meets():
    """Mutant: a key that is looked up after has_met() (distributed/peer.py)."""
    for wrong in as_peers(workers.collected_meanwhile):
        assert not wrong
