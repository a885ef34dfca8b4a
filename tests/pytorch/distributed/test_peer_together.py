# Groups at work together over channels to peers, each with words and memory of its own: bits as over the group. On CUDA
# with any number of hardware queues. Mutant, in csrc/distributed/peer.cpp: a channel that is found by the device alone
# turns these red.
import pytest
from ranks import as_peers

from . import peer_together_workers as workers

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def deadline(monkeypatch):
    monkeypatch.setenv("TE_COMM_TIMEOUT_S", "20")


def test_two_groups_at_once():
    for wrong in as_peers(workers.two_groups):
        assert not wrong, "\n".join(wrong[:8])


def test_groups_that_cross():
    for wrong in as_peers(workers.crossing_groups, ranks=4):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.gpu
@pytest.mark.parametrize("connections", [1, 8, 32])
def test_any_number_of_queues(connections, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
    for wrong in as_peers(workers.on_few_queues):
        assert not wrong, "\n".join(wrong[:8])
