# Edges of tensor parallelism on gloo ranks. Mutants: the largest amax asked for without the question whether the ranks
# agree, or a backward's gather that counts as a forward's, end or hang the ranks here.
import parallel_edge_workers as workers
import pytest
from ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def found():
    """Of every worker, what each of two ranks brings."""
    ranks = on_ranks(workers.everything)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_ranks_that_disagree_hear_of_it(found):
    one, other = found["disagreeing"]
    assert one == other
    for what, words, works in one:
        assert words.startswith("ValueError: the ranks of the process group") and works, (what, words)
    backward = one[-1][1]
    assert (
        "rank 0 brings Float [128, 32] to group_gather_again, rank 1 brings Float [128, 32] to group_gather;"
        in backward
    )


@pytest.mark.parametrize("worker", ["no_tokens", "called_sinks"])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, wrong[:5]


def test_an_input_without_tokens_is_called_by_its_name(found):
    for said in found["without_dimensions"]:
        for op, words in zip(("LayerNormMLP", "LayerNormLinear", "Linear"), said, strict=True):
            assert words.startswith(f"ValueError: {op}: argument 'inp' has shape [32], wanted at least two"), words
