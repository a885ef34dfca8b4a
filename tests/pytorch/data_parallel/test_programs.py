# Random programs of two ranks have the weights of one process on the whole batch, to the bit: any options, microbatches
# under no_sync(), unused and frozen parameters, a weight that is used twice, backwards that an exception ends, steps
# that are not taken, files in mid-run, and modules that are wrapped again. The programs are the same in each run of the
# test. Other programs have weights in FP8 (rows on and off 16 bytes), experts, delayed gradients, clipping and a
# GradScaler; their masters are those of plain torch, within the rounding of float32, and their bytes exactly those of
# the masters.
import pytest
from ranks import on_ranks

from . import fp8_program_workers
from .fp8_program_workers import FP8_PROGRAMS
from .program_workers import PROGRAMS, programs

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def two():
    return on_ranks(programs, 2, ranks=2)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(two, seed):
    for rank, got in enumerate(two):
        assert not got[f"seed {seed}"], f"rank {rank}: {got[f'seed {seed}']}"


@pytest.fixture(scope="module")
def fp8():
    return on_ranks(fp8_program_workers.programs, 2, ranks=2)


@pytest.mark.parametrize("seed", range(FP8_PROGRAMS))
def test_program_in_fp8(fp8, seed):
    for rank, got in enumerate(fp8):
        assert not got[f"FP8, seed {seed}"], f"rank {rank}: {got[f'FP8, seed {seed}']}"
