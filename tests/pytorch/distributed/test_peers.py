# Layers whose ranks push rows into each other's memory (tp_overlap="chunked"), several processes on the CPU or on one
# CUDA device: the bits of the same layers over the group. Mutants, in csrc/layer/exchange_peer.cpp and
# common/ops/comm/peer.cpp: a wait left out, a run before its rows, a word that is not put back, partials in the order
# in which they arrive, turn these red.
import parallel_workers
import peer_graph_workers as graph_workers
import peer_workers as workers
import pytest
import torch
from ranks import as_peers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunked_is_serial(ranks):
    for wrong, usage in as_peers(workers.same_bits, torch.float32, ranks=ranks):
        assert not wrong, "\n".join(wrong[:8])
        assert usage.leased == 0 and usage.slots > 0


def test_chunked_is_serial_in_bfloat16():
    for wrong, _ in as_peers(workers.same_bits, torch.bfloat16):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("recipe", ["current", "block", "delayed", "current, dequantized"])
def test_chunked_is_serial_in_fp8(recipe):
    for wrong, _ in as_peers(workers.same_bits, torch.bfloat16, (recipe,)):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("name", sorted(parallel_workers.MODULES))
def test_divided_is_whole(name):
    """Every option of every module, over channels; what recomputes its gather to the bits of what keeps it."""
    for wrong in as_peers(parallel_workers.products, name, torch.float32, "none", "chunked"):
        assert not wrong, "\n".join(wrong[:5])


def test_products_without_runs_are_serial():
    for wrong, _ in as_peers(workers.same_bits, torch.float32, ("none",), "libtorch"):
        assert not wrong, "\n".join(wrong[:8])


def test_replays_have_the_bits_of_eager_steps():
    for wrong in as_peers(graph_workers.callables):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.gpu
def test_500_replays_and_eager_calls_between():
    for wrong in as_peers(graph_workers.whole_steps):
        assert not wrong, "\n".join(wrong[:8])


def test_explain_says_which_runs():
    for found in as_peers(workers.explained):
        for text in found.values():
            assert text.count("peers, chunked") == 2, text  # in the forward and in the backward
