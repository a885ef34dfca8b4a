# backward_override where a module is divided over ranks: the bits of a plain divided module's backward of the same
# operands, eager and compiled. That divided modules have the whole ones' values is distributed/test_parallel.py's.
# Mutants: the gathered operand read columnwise (GroupTPComm::whole), or quantized as the forward's in high precision
# (GatheredWgrad::gathered), turn these red.
import pytest
from ranks import on_ranks

from . import override_workers as workers

pytestmark = pytest.mark.dist


def test_the_backward_is_the_plain_one_of_its_operands():
    for wrong in on_ranks(workers.against_the_reference):
        assert not wrong, wrong[:5]


def test_compiled_is_eager():
    for wrong in on_ranks(workers.compiled):
        assert not wrong, wrong[:5]
