# allreduce_sequence_parallel_grads on four processes: those of one process that sees every token, where they lie, how
# many collectives that takes, refusals.
import pytest
import torch
from ranks import on_ranks
from support import U32, UNIT_ROUNDOFF, assert_same_bits, assert_within, rounding, sum_error, wide

from . import gradient_workers

RANKS = gradient_workers.RANKS
OWN = sum(range(1, RANKS + 1))  # what the ranks' own parts of whole-number gradients add up to
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results():
    return on_ranks(gradient_workers.everything, RANKS, ranks=RANKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_all_tokens(results, dtype):
    module = gradient_workers.norms(dtype)
    marked = [name for name, p in module.named_parameters() if getattr(p, "sequence_parallel", False)]
    assert marked == ["0.weight", "0.bias", "2.weight"]
    unsharded = gradient_workers.grads_of(module, gradient_workers.batch(dtype))
    unsharded = {name: grad.cpu() for name, grad in unsharded.items()}
    for got in results:
        assert got["collectives", dtype] == 1
        summed = got["summed", dtype]
        for name, grad in summed.items():
            own = [other["own", dtype][name] for other in results]
            if name not in marked:
                assert_same_bits(grad, got["own", dtype][name], name)
                continue
            # The sum in float32, in the backend's order, rounded once; every token's: to a few roundings on each side.
            total, sizes = sum(wide(g) for g in own), sum(wide(g).abs() for g in own)
            assert_within(grad, total, sum_error(sizes, RANKS) + rounding(total * (1 + U32 * RANKS), dtype), name)
            bound = (
                sum(rounding(g, dtype) for g in [*own, grad]) + 64 * UNIT_ROUNDOFF[dtype] * unsharded[name].abs().max()
            )
            assert_within(grad, unsharded[name].double(), bound, name)


def test_the_same_bits_each_time_and_on_each_rank(results):
    for got in results:
        for again in got["again"]:
            for name, grad in results[0]["summed", torch.float32].items():
                if "1." not in name:
                    assert_same_bits(again[name], grad, name)


def test_where_a_gradient_lies(results):
    for rank, got in enumerate(results):
        of_first = 10.0 * 2 + 1  # rank 0 has none there
        wanted = [
            torch.full((3,), float(OWN)),
            torch.full((2, 2), 10.0 * RANKS + OWN),
            torch.full((4,), 20.0 * RANKS + OWN - of_first),
            torch.full((5,), float(OWN)),
            torch.full((2,), float(rank)),
        ]
        for i, want in enumerate(wanted):
            assert_same_bits(got["places"][i], want, f"rank {rank}: {i}")
        for i, grad in enumerate(got["FSDP2"]):  # over the two of a row of the mesh
            assert_same_bits(grad, torch.full((gradient_workers.HIDDEN,), 20.0 * i + 3), f"rank {rank}: FSDP2 {i}")
        assert_same_bits(got["DTensor"], torch.full((2, 3), float(OWN)), f"rank {rank}: DTensor")


def test_few_collectives(results):
    for got in results:
        assert got["buckets"] == 3
        for i, grad in enumerate(got["of buckets"]):
            assert_same_bits(grad, torch.full(grad.shape, 10.0 * RANKS * i + OWN), f"{i}")


def test_refusals_are_the_same_on_every_rank(results):
    words = {
        "module": ("TypeError", "'module'", "list", "torch.nn.Module"),
        "group": ("TypeError", "'group'", "str"),
        "sparse": ("ValueError", "'p1'", "sparse", "[4]"),
        "device": ("ValueError", "p1", "meta", "gloo"),
        "others": ("ValueError", "'module'", "rank 0 1 of 3", f"rank {RANKS - 1} 2 of 7"),
        "destroyed": ("RuntimeError", "'group'", "destroyed"),
    }
    first = results[0]["refused"]
    assert all(got["refused"] == first for got in results)
    for case, wanted in words.items():
        assert first[case] is not None and first[case][0] == wanted[0], (case, first[case])
        for word in ("allreduce_sequence_parallel_grads", *wanted[1:]):
            assert word in first[case][1], (case, first[case])
