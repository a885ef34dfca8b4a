# What divided layers gather for one call lies in memory on lease: it goes back with the call, and the next one
# overwrites it. Mutants: layers that keep what is on lease (csrc/layer/forward.cpp, `keeps`), with the doors or without
# them; a slot given back while it is read (Leases inside of GatheredProduct::gathered); memory that is handed on while
# somebody has a view of it (lease.cpp, `shared`), turn these red.
import parallel_lease_workers as workers
import pytest
import torch.distributed as dist
from ranks import here, on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found():
    """Of every worker, what each of two ranks brings."""
    ranks = on_ranks(workers.everything)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("worker", ["stacked", "held", "raised"])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, "\n".join(wrong[:5])


def test_as_much_for_two_layers_as_for_sixteen(found):
    tokens = 2 * workers.TOKENS * workers.BATCH
    largest = tokens * max(workers.HIDDEN, workers.WIDE) * 4
    for sizes in found["sizes"]:
        assert sizes.pop("let go") == [(0, 0, 0)]
        for what, (few, many) in sizes.items():
            assert few == many, what
            bytes_, slots, leased = few
            assert leased == 0 and 0 < slots <= 6 and bytes_ <= 2 * (largest + largest), (what, few)


def test_what_keeping_costs_at_the_peak():
    """layers x (t - 1) / t x M x K x e, within a twentieth: of one process whose group only looks like two, so that no
    thread of a backend holds memory. On CUDA benchmarks/bench_parallel.py measures it."""
    if here().type == "cuda":
        pytest.skip("the CPU's allocator is watched here")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        costs = workers.peaks(0)
    finally:
        dist.destroy_process_group()
    assert all(0.95 <= cost <= 1.05 for cost in costs.values()), costs
