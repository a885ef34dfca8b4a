# Pooled buffers on CUDA: in captured graphs, on streams at work together, and filled with NaN after their return; over
# NCCL and one rank. Mutants: a buffer of a capture that is a slot of the pool (may_pool() in comm_buffer_pool.cpp),
# slots that streams share, turn these red.
import pytest
from ranks import on_ranks

from . import pool_graph_workers as workers

pytestmark = [pytest.mark.dist, pytest.mark.gpu]


@pytest.fixture(scope="module")
def found():
    return on_ranks(workers.everything, ranks=1, device="cuda", shared=False)[0]


@pytest.mark.parametrize("worker", [worker.__name__ for worker in workers.WORKERS])
def test_nothing_is_wrong(found, worker):
    assert not found[worker], "\n".join(found[worker][:5])
