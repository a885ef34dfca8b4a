# The memory of channels to peers: reserved by initialize_ub, counted in te.memory_plan, never made in a capture, and on
# CUDA gone with its group where no graph holds it.
import pytest
from ranks import as_peers

from . import peer_memory_workers as workers

pytestmark = pytest.mark.dist


def test_initialize_ub_reserves_at_the_first_call():
    for (small, large), (told_small, told_large) in as_peers(workers.reserved):
        assert small[0] < large[0] and small[0] < told_small[0], "nothing was reserved"
        assert told_small == told_large and told_small[0] >= large[0], "not enough was"


def test_memory_plan_has_the_slots_that_peers_push_to():
    for arenas, channel, group in as_peers(workers.planned):
        assert len(arenas) == 1 and arenas[0] == group >= channel > 0


@pytest.mark.gpu
def test_a_capture_makes_no_memory():
    for (unmet, larger), wrong in as_peers(workers.grows_in_a_capture):
        assert "have not met" in unmet and "run the same call once before the capture" in unmet, unmet
        assert "bytes of shared memory cannot be allocated during a graph capture" in larger, larger
        assert "run the same call once before the capture" in larger and "initialize_ub" in larger, larger
        assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_channels_of_dead_groups_end_unless_a_graph_holds_them(captured):
    for found in as_peers(workers.channels_of_dead_groups, captured):
        assert found == ([1, 2, 3, 4] if captured else [1, 1, 1, 1])
