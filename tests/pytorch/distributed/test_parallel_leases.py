# What divided layers gather for one call lies in memory on lease: it goes back with the call, and the next one
# overwrites it. Mutants: a recomputed layer that keeps what is on lease (keeps in csrc/layer/forward.cpp always false),
# a slot given back while it is read (Leases inside of GatheredProduct::gathered), one that is taken twice (first slot
# in lease.cpp without a look at `leased`), turn these red.
import parallel_lease_workers as workers
import pytest
from ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found():
    """Of every worker, what each of two ranks brings."""
    ranks = on_ranks(workers.everything, device="cpu")
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("worker", ["stacked", "held", "raised"])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, "\n".join(wrong[:5])


def test_as_much_for_two_layers_as_for_sixteen(found):
    tokens = 2 * workers.TOKENS * workers.BATCH
    largest = tokens * max(workers.HIDDEN, workers.WIDE) * 4
    for sizes in found["sizes"]:
        for what, (few, many) in sizes.items():
            assert few == many, what
            bytes_, slots, leased = few
            assert leased == 0 and 0 < slots <= 6 and bytes_ <= 2 * (largest + largest), (what, few)


def test_what_keeping_costs_at_the_peak(found):
    """layers x (t - 1) / t x M x K x e, within a twentieth."""
    for costs in found["peaks"]:
        assert 0.95 <= costs[16] <= 1.05, costs
