# gather_along_first_dim, reduce_scatter_along_first_dim and allreduce: two processes, and one process without
# any group.
import pytest
import rank_workers
import torch
from ranks import on_ranks
from support import assert_same_bits, refused

from transformer_engine.pytorch.distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim


@pytest.mark.dist
def test_on_two_ranks():
    results = on_ranks(rank_workers.collectives)
    inputs = [rank_workers.of_rank(rank, 4, 3) for rank in range(2)]
    total = inputs[0] + inputs[1]
    for rank, got in enumerate(results):
        wanted = {"input": inputs[rank], "afterwards": inputs[rank]}
        for suffix in (", async_op=False", ", async_op=True", " into a tensor"):
            wanted["gather" + suffix] = torch.cat(inputs)
            wanted["reduce_scatter" + suffix] = total[2 * rank : 2 * rank + 2]
            if suffix != " into a tensor":
                wanted["gather of columns" + suffix] = torch.cat([t.t() for t in inputs])
                wanted["allreduce" + suffix] = wanted["allreduce of all ranks" + suffix] = total
        message = got.pop("three rows")
        assert all(word in message for word in ("reduce_scatter_along_first_dim", "'inp'", "3 rows", "2 ranks"))
        assert sorted(got) == sorted(wanted)
        for name, want in wanted.items():
            assert_same_bits(got[name], want, f"rank {rank}: {name}")


def test_on_one_rank_nothing_happens():
    x = torch.randn(4, 3)
    wanted = x.clone()
    for call in (gather_along_first_dim, reduce_scatter_along_first_dim, allreduce):
        for async_op in (False, True):
            result, work = call(x, None, async_op)
            assert result is x and work is None
    out = torch.full((4, 3), torch.nan)
    for call in (
        lambda: gather_along_first_dim(x, None, output_tensor=out),
        lambda: reduce_scatter_along_first_dim(x, None, output=out),
    ):
        out.fill_(torch.nan)
        assert call()[0] is out
        assert_same_bits(out, wanted)
    assert_same_bits(x, wanted)


def test_misuse_is_named():
    x = torch.randn(4, 3)
    with refused(TypeError, "gather_along_first_dim", "'quantizer'", "wanted a Quantizer"):
        gather_along_first_dim(x, None, quantizer=object())
    with refused(NotImplementedError, "gather_along_first_dim", "'external_coalescing'", "True"):
        gather_along_first_dim(x, None, external_coalescing=True)
    for call in (gather_along_first_dim, reduce_scatter_along_first_dim):
        with refused(ValueError, call.__name__, "'inp'", "no dimensions"):
            call(torch.ones(()), None)
    with refused(ValueError, "gather_along_first_dim", "'output_tensor'", "(4, 2)", "(4, 3)"):
        gather_along_first_dim(x, None, output_tensor=torch.empty(4, 2))
    with refused(ValueError, "reduce_scatter_along_first_dim", "'output'", "float64", "float32"):
        reduce_scatter_along_first_dim(x, None, output=torch.empty(4, 3, dtype=torch.float64))
