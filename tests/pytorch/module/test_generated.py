# Random programs over eager modules: recipes, weights held in FP8, recomputation, microbatches in flight, weight
# gradients elsewhere, writes, exceptions, copies and files. oracles_*.py define which results have to be equal, most of
# them to the bit; a failure shows its seed and the program's steps. Mutants: a gradient that is left out where it alone
# is wanted, an amax that is noted twice, a scale that stays as it was.
import pytest
from fp8_steps import assert_same_tensors
from generated import Program
from ranks import on_ranks

from . import workers
from .oracles_gradients import ORACLES as OF_GRADIENTS
from .oracles_state import ORACLES as OF_STATE
from .oracles_writes import ORACLES as OF_WRITES

pytestmark = pytest.mark.usefixtures("fp8_left_off")
GENERATED = 20


@pytest.mark.filterwarnings("ignore:.*its quantizers are made again.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*in a single process.*:UserWarning")
@pytest.mark.parametrize("oracle", (*OF_GRADIENTS, *OF_STATE, *OF_WRITES), ids=lambda oracle: oracle.__name__)
def test_a_program_over_modules(oracle, generated_seed):
    with Program(generated_seed, oracle.__name__).told() as program:
        oracle(program)


def test_two_ranks_keep_the_histories_of_one_process(request):
    seeds = range(request.config.getoption("generated", None) or 8)
    ranks = on_ranks(workers.programs, seeds, device="cpu")
    for seed in seeds:
        alone = workers.run(seed, None)
        for rank in ranks:
            for at, wanted in enumerate(alone):
                if wanted:
                    assert_same_tensors(rank[seed][at], wanted)
