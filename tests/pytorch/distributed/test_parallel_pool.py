# Tensors that divided layers gather for one call use pooled buffers: the buffers return to the pool at the end of the
# call, and the next call overwrites them. Mutants: layers that save pooled buffers (csrc/layer/forward.cpp, `keeps`),
# with refuse_pooled() or without; a slot given back while it is read (ScopedBuffers inside of GatheredWgrad::gathered);
# memory that is handed on while a view of it is alive (comm_buffer_pool.cpp, `shared`), or that is filled with NaN
# then; slots that groups share (Key), turn these red.
import contextlib

import pytest
import torch.distributed as dist
from ranks import found_by
from torch.testing._internal.distributed.fake_pg import FakeStore

import transformer_engine.pytorch as te

from . import parallel_pool_workers as workers

pytestmark = pytest.mark.dist
found = found_by(workers.everything)


@contextlib.contextmanager
def looking_like_two():
    """One process whose groups only look like two ranks: what they gather is their own, twice."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_each_group_has_slots_of_its_own():
    with looking_like_two():
        used, groups = [], [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups:
            workers.interleaved(workers.pairs(1, tp_group=group), workers.drawn(0, 1))
            used.append([te.distributed.comm_usage(g) for g in groups])
        (first, nothing), (first_then, second) = used
        assert first.slots and first.bytes and nothing.slots == 0
        assert first_then == first == second
    te.destroy_ub()


@pytest.mark.parametrize("worker", ["stacked", "held", "planned", "raised"])
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
    thread of a backend holds memory."""
    with looking_like_two():
        costs = workers.peaks(0)
    assert all(0.95 <= cost <= 1.05 for cost in costs.values()), costs
