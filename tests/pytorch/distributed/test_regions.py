# The differentiable collectives: values and gradients on two processes, what they keep (nothing), and what they refuse
# on every rank alike.
import pytest
import torch
from rank_workers import of_rank
from ranks import on_ranks
from support import assert_same_bits, refused

from . import region_workers
from .region_workers import REGIONS, ROWS, WIDTH

RANKS = 2


def applied(name, of_ranks):
    """The result of each rank for the tensors of all ranks."""
    rows = of_ranks[0].shape[0] // RANKS
    total = of_ranks[0] + of_ranks[1]
    if name == "gather":
        return [torch.cat(of_ranks)] * RANKS
    if name == "reduce_scatter":
        return list(total.split(rows))
    if name == "scatter":
        return [t[rank * rows : (rank + 1) * rows] for rank, t in enumerate(of_ranks)]
    return [total] * RANKS if name == "reduce" else of_ranks


ADJOINT = {
    "gather": "reduce_scatter",
    "reduce_scatter": "gather",
    "scatter": "gather",
    "reduce": "copy",
    "copy": "reduce",
}


@pytest.mark.dist
def test_values_and_gradients_on_two_ranks():
    results = on_ranks(region_workers.regions)
    inputs = [of_rank(rank, ROWS, WIDTH) for rank in range(RANKS)]
    ones = [torch.ones(ROWS, WIDTH)] * RANKS
    for name in REGIONS:
        for rank, (out, grads, kept) in enumerate(results):
            assert kept[name] == 0, f"{name} keeps {kept[name]} tensors for its backward"
            for layout in ("contiguous", "transposed"):
                assert_same_bits(out[name, layout], applied(name, inputs)[rank], f"rank {rank}: {name} {layout}")
            assert_same_bits(out[name, "twice"], out[name, "of ones"], f"rank {rank}: {name} differentiated twice")
            assert_same_bits(out[name, "of ones"], applied(name, ones)[rank])
            for key in (key for key in grads if key[0] == name):
                given = [other[1][key][0] for other in results]
                wanted = applied(ADJOINT[name], given)[rank]
                assert_same_bits(grads[key][1], wanted, f"rank {rank}: the gradient of {key}")


@pytest.mark.dist
def test_refusals_are_the_same_on_every_rank():
    first, second = on_ranks(region_workers.refusals)
    words = {
        "uneven": ("ValueError", "'inp'", "rank 0", f"[{ROWS}, {WIDTH}]", "rank 1", f"[{ROWS + 2}, {WIDTH}]"),
        "dtype": ("ValueError", "'inp'", "float32", "bfloat16"),
        "device": ("ValueError", "'inp'", "meta", "cpu", "gloo"),
        "no tensor": ("TypeError", "'inp'", "list"),
        "no group": ("TypeError", "group'", "str", "ProcessGroup"),
        "rows": ("ValueError", "'inp'", "3 rows", "2 ranks"),
        "destroyed": ("RuntimeError", "group'", "destroyed"),
        "not in it": ("ValueError", "group'", "not in"),
        "mixed": ("ValueError", "different functions", "rank 0", "rank 1"),
    }
    assert sorted(key for key in second if key[1] != "not in it") == sorted(first)
    for (name, case), told in second.items():
        assert told is not None, (name, case)
        assert told[0] == words[case][0], (name, case, told)
        for word in words[case][1:]:
            assert word in told[1], (name, case, told)
        if case not in ("not in it", "mixed"):
            assert first[name, case] == told


@pytest.mark.dist
def test_torch_compile_takes_them_whole():
    assert on_ranks(region_workers.compiled) == [[], []]


def test_alone_nothing_happens():
    x = torch.randn(3, 2, requires_grad=True)
    for region in REGIONS.values():
        assert region(x) is x
        with refused(TypeError, region.__name__, "'inp'", "list"):
            region([1.0])
    with refused(ValueError, "gather_from_sequence_parallel_region", "'inp'", "no dimensions"):
        REGIONS["gather"](torch.ones(()))
