# Drawn programs over divided modules against the same modules whole (parallel_programs.py): what no test of one
# option meets. Mutants: a norm's gradient that the module adds up, a norm's output that torch.compile cannot gather.
import pytest
from ranks import on_ranks

from . import parallel_programs as programs

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(80)), (4, range(1000, 1024))])
def test_divided_is_whole(ranks, seeds):
    for found in on_ranks(programs.everything, seeds, ranks=ranks):
        assert not found, "\n".join(f"{seed} {programs.draw(seed)}: {wrong[:3]}" for seed, wrong in found[:3])
