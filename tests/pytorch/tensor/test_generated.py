# Random programs over quantized tensors, their views, aliases and copies: never silently another value than torch's own
# operations would leave there, one rounding of the format aside. programs.py defines programs.
import pytest
from generated import Program
from quantized_cases import FORMATS

from . import programs

GENERATED = 40


@pytest.mark.parametrize("name", FORMATS)
def test_a_program_over_a_quantized_tensor(name, generated_seed):
    with Program(generated_seed, name).told() as program:
        programs.run(program, name)
