# Rare uses of tensor-parallel layers, on gloo ranks. Mutants: a gather of memory that is not contiguous, a sum in
# place, products of a delayed gradient that name nothing they read.
import pytest
from ranks import found_by

from . import parallel_rare_workers as workers

pytestmark = pytest.mark.dist
found = found_by(workers.everything)


@pytest.mark.parametrize("worker", [worker.__name__ for worker in workers.WORKERS])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, wrong[:5]
