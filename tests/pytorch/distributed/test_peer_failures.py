# Ranks over channels of which one makes another call than the others while all processes live: the results after it are
# NaN, and the next call of every rank raises CommTimeout, a replay of te.make_graphed_callables before anything is
# replayed. Mutants: peer_gather() that poisons nothing and PeerCall without refuse_failed()
# (csrc/distributed/peer.cpp), words without the dtype (csrc/layer/tp_comm_peer.cpp), turn these red.
import pytest
from ranks import as_peers

from . import peer_failure_workers as workers

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setenv("TE_COMM_TIMEOUT_S", "3")


def test_a_rank_that_calls_alone():
    for nan, raised, again in as_peers(workers.calls_alone):
        words, op, peer, rank, step = raised
        assert nan and (rank, peer, step) == (0, 1, "arrive"), raised
        assert "rank 0 waited for rank 1, which is late" in words and "make a new group" in words, words
        assert op.startswith("gather, product (forward) Float") and op in words
        assert again == raised


def test_a_rank_that_comes_to_the_first_call_alone():
    (raised, waited), _ = as_peers(workers.meets_alone)
    words, _, peer, rank, step = raised
    assert (rank, peer, step) == (0, 1, "grow") and "it is late, or makes another call" in words, raised
    assert 2.9 < waited < 12


def test_a_weight_gradient_of_a_gather_that_failed_is_nan():
    for sound, nan, raised in as_peers(workers.gathers_alone):
        assert sound and nan
        assert raised[1].startswith("gather Float") and raised[2:] == (1, 0, "arrive"), raised


def test_an_error_in_the_middle_of_a_call():
    """Mutant: a call that ends before all ranks were waited for, and does not give up (PeerCall)."""
    (words, _), _ = found = as_peers(workers.raises_inside_a_call)
    assert "main_grad" in words, found
    for _, behind in found:
        assert behind is not None and "gave up in a call that raised an error" in behind[0], found


def test_ranks_of_different_dtypes():
    for roomy, growing in as_peers(workers.other_dtypes):
        for words, *_ in (roomy, growing):
            assert "Float [" in words and "BFloat16 [" in words, words
        assert "is at another call" in roomy[0] and roomy[4] == "arrive", roomy
        assert "different calls" in growing[0] or "gave up" in growing[0], growing


def test_replays_on_a_failed_channel():
    for found in as_peers(workers.replays_on_a_failed_channel):
        assert len(found) == 3
        for raised, replayed, eager in found:
            assert "rank 1 gave up in by hand" in raised[0] and raised[4] == "call", raised
            assert replayed == 0
            assert eager == raised


@pytest.mark.gpu
def test_plain_graphs_on_a_failed_channel():
    for unsound, not_nan, raised in as_peers(workers.plain_graphs_on_a_failed_channel):
        assert not unsound and not not_nan
        assert "gave up" in raised[0], raised
