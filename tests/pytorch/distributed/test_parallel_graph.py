# A column and a row over several ranks, captured: by te.make_graphed_callables (on the CPU its recorder), and on CUDA
# as one graph of torch's, collectives over NCCL in it. Replays have the bits of eager steps.
import pytest
from ranks import must_be_captured, on_ranks

from . import parallel_graph_workers as workers

pytestmark = pytest.mark.dist


def test_replays_have_the_bits_of_eager_steps(device):
    if device == "cuda":
        must_be_captured()
    for wrong in on_ranks(workers.replays, device=device):
        assert not wrong, "\n".join(wrong[:5])


@pytest.mark.gpu
def test_a_whole_step_in_one_graph():
    must_be_captured()
    for wrong in on_ranks(workers.whole_steps, device="cuda"):
        assert not wrong, "\n".join(wrong[:5])
