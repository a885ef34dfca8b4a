# Steps of shards are steps of whole parameters in one process, bit for bit, by each optimizer and however weights are
# held; norms, clipping, skipped steps and GradScaler. Ranks start once, and run every case.
import pytest
from ranks import at_most, on_ranks

from .optimizer_workers import OTHERS, everything, grid
from .pitched_workers import CASES

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def two():
    return on_ranks(everything, at_most(2), ranks=at_most(2))


@pytest.mark.parametrize("name", [*grid(), *OTHERS, *CASES])
def test_two_ranks(two, name):
    for rank, got in enumerate(two):
        assert not got[name], f"rank {rank}: {got[name]}"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_numbers_of_ranks(ranks):
    if at_most(ranks) < ranks:
        pytest.skip(f"needs {ranks} devices")
    for rank, got in enumerate(on_ranks(everything, ranks, ranks=ranks)):
        assert not any(got.values()), f"rank {rank}: {[text for text in got.values() if text]}"
