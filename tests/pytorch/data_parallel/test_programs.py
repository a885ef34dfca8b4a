# Random programs of two ranks have the weights of one process on the whole batch, to the bit: any options, microbatches
# under no_sync(), unused and frozen parameters, a weight that is used twice, backwards that an exception ends, steps
# that are not taken, files in mid-run, and modules that are wrapped again. The programs are the same in each run of the
# test.
import pytest
from ranks import on_ranks

from .program_workers import PROGRAMS, programs

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def two():
    return on_ranks(programs, 2, ranks=2)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(two, seed):
    for rank, got in enumerate(two):
        assert not got[f"seed {seed}"], f"rank {rank}: {got[f'seed {seed}']}"
