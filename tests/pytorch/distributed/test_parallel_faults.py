# Groups that are destroyed, and tensors that are shared or written, while divided layers run on gloo ranks. Mutants: a
# sum of gradients that is written after the backward's end, a backward that gathers into a tensor of its caller, slots
# without a group in their name, turn these red.
import pytest
from ranks import found_by

from . import parallel_fault_workers as workers

pytestmark = pytest.mark.dist
found = found_by(workers.everything)


@pytest.mark.parametrize("worker", [worker.__name__ for worker in workers.WORKERS])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, wrong[:5]
