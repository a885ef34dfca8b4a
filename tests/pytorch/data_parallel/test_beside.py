# Two ranks of data parallelism beside other parts that hold back steps or memory: the stash's gate of all ranks, and
# offload. Ranks start once, and run every case.
import pytest
from ranks import on_ranks

from .beside_workers import CASES, everything

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def two():
    return on_ranks(everything, 2, ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two, name):
    for rank, got in enumerate(two):
        assert not got[name], f"rank {rank}: {got[name]}"
