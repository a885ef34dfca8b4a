# symmetric_all_reduce: on two processes, on the CPU, where it is torch.distributed's sum, or by the kernels over
# symmetric memory on CUDA devices that reach each other; what it refuses by name.
import pytest
import torch
from rank_workers import of_rank
from ranks import on_ranks
from support import assert_same_bits, refused

from transformer_engine.pytorch.distributed import symmetric_all_reduce

from . import region_workers

# On devices as the suites have them, and in any case where there is a CUDA device on that one, which the ranks share.
PLACES = [
    pytest.param({}, id="as all suites"),
    pytest.param({"device": "cuda", "shared": True}, id="one CUDA device", marks=pytest.mark.gpu),
]


@pytest.mark.dist
@pytest.mark.parametrize("places", PLACES)
def test_on_two_ranks(places):
    results = on_ranks(region_workers.symmetric, **places)
    total = of_rank(0, 4, 3) + of_rank(1, 4, 3)
    many = sum(of_rank(30 + rank, *region_workers.MANY) for rank in range(2))
    assert results[0]["refused"] == results[1]["refused"]
    for got in results:
        for name, result in got["sums"].items():
            wanted = many.to(result.dtype) if "many" in name else total.t() if "transposed" in name else total
            assert_same_bits(result, wanted, name)
        assert got["empty"].shape == (0, 3)
        for case, words in {
            "multimem": ("NotImplementedError", "'multimem_all_reduce'", "one_shot"),
            "uneven": ("ValueError", "'inp'", "rank 0", "rank 1"),
            "device": ("ValueError", "'inp'", "meta"),
        }.items():
            told = got["refused"][case]
            assert told[0] == words[0] and all(word in told[1] for word in ("symmetric_all_reduce", *words[1:])), told


@pytest.mark.dist
@pytest.mark.parametrize("places", PLACES)
def test_of_modules(places):
    for wrong in on_ranks(region_workers.symmetric_modules, **places):
        assert not wrong, "\n".join(wrong[:5])


def test_alone_it_is_the_input():
    x = torch.randn(3)
    for kind in ("one_shot", "two_shot"):
        assert symmetric_all_reduce(x, all_reduce_type=kind) == (x, None)
    with refused(NotImplementedError, "symmetric_all_reduce", "'all_reduce_type'", "'multimem_all_reduce'", "two_shot"):
        symmetric_all_reduce(x)
    with refused(ValueError, "symmetric_all_reduce", "'all_reduce_type'", "'ring'", "one_shot"):
        symmetric_all_reduce(x, all_reduce_type="ring")
    with refused(TypeError, "symmetric_all_reduce", "'inp'", "list"):
        symmetric_all_reduce([1.0], all_reduce_type="one_shot")
