# Steps that do not end as they should: backwards that an exception ends, on all ranks or on one, microbatches that are
# all held back, and flags that one rank alone sets. Ranks start once, and run every case; those that break their
# process group come last.
import pytest
from ranks import on_ranks

from .recovery_workers import CASES, everything

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
ON_CPU = ("one_rank_leaves", "one_rank_lacks_a_gradient")  # NCCL ends the process after a timeout


@pytest.fixture(scope="module")
def two():
    from ranks import on_cuda

    return on_ranks(everything, 2, [name for name in CASES if not (on_cuda() and name in ON_CPU)], ranks=2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two, name):
    for rank, got in enumerate(two):
        if name in got:
            assert not got[name], f"rank {rank}: {got[name]}"
