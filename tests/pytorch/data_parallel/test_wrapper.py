# Gradients of several ranks are those of one process that sees the whole batch, to the bit; weights are whole where
# they are read. Ranks start once, and run every case.
import pytest
from ranks import at_most, on_ranks

from .wrapper_workers import OTHERS, everything, grid

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def found():
    brought = {}

    def of(ranks):
        if ranks not in brought:
            brought[ranks] = on_ranks(everything, ranks, ranks=ranks)
        return brought[ranks]

    return of


def check(found, ranks, name):
    for rank, got in enumerate(found(ranks)):
        assert not got[name], f"rank {rank} of {ranks}: {got[name]}"


@pytest.mark.parametrize("name", [*grid(), *OTHERS])
def test_two_ranks(found, name):
    check(found, at_most(2), name)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_other_numbers_of_ranks(found, ranks):
    if at_most(ranks) < ranks:
        pytest.skip(f"needs {ranks} devices")
    for name in [*grid(ranks), *OTHERS]:
        check(found, ranks, name)


def test_experts_over_two_of_four_ranks(found):
    if at_most(4) < 4:
        pytest.skip("needs 4 devices")
    check(found, 4, "experts")
