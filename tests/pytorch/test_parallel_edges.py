# Edges of tensor parallelism on gloo ranks. Mutants: the largest amax asked for without the question whether the ranks
# agree, or a backward's gather that counts as a forward's, end or hang the ranks here.
import parallel_edge_workers as workers
import pytest
from ranks import on_ranks

pytestmark = pytest.mark.dist


def test_ranks_that_disagree_hear_of_it():
    one, other = on_ranks(workers.disagreeing)
    assert one == other
    for what, words, works in one:
        assert words.startswith("ValueError: the ranks of the process group") and works, (what, words)
    backward = one[-1][1]
    assert (
        "rank 0 brings Float [128, 32] to group_gather_again, rank 1 brings Float [128, 32] to group_gather;"
        in backward
    )
