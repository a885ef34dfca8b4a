# Memory on lease on CUDA: in captured graphs, on streams at work together, and NaN where it was given back; over NCCL
# and one rank. Mutants: a lease of a capture that is a slot of the arena (may_last in comm_buffer_pool.cpp), slots that
# streams share, turn these red.
import pytest
from ranks import on_ranks

from . import lease_graph_workers as workers

pytestmark = [pytest.mark.dist, pytest.mark.gpu]


@pytest.fixture(scope="module")
def found():
    return on_ranks(workers.everything, ranks=1, device="cuda", shared=False)[0]


@pytest.mark.parametrize("worker", [worker.__name__ for worker in workers.WORKERS])
def test_nothing_is_wrong(found, worker):
    assert not found[worker], "\n".join(found[worker][:5])
