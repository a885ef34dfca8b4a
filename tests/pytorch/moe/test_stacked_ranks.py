# Stacked experts over ranks: data parallelism with sharded states, whose files load at other numbers of ranks, files of
# before, experts that ranks divide among themselves, and FSDP2, which shards by experts.
import pytest
import torch
from ranks import at_most, on_ranks
from support import assert_same_bits
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .cases import EXPERTS, FFN, HIDDEN
from .stacked_workers import OPTIMIZERS, beside_ddp, convert, load, part_of_a_file, save, sharded_by_fsdp2, whole_states

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def same(got, want):
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert_same_bits(got[name], t, name)


def needs(ranks):
    if at_most(ranks) < ranks:
        pytest.skip(f"needs {ranks} devices")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of today by one rank, of before by two, and the weights of both runs two steps later."""
    today, before = (str(tmp_path_factory.mktemp(name)) for name in ("today", "before"))
    return today, before, on_ranks(save, today, False, ranks=1)[0], on_ranks(save, before, True, ranks=2)[0]


def test_the_run_is_that_of_a_parameter_for_each_expert(saved):
    _, _, today, before = saved
    for name in OPTIMIZERS:
        same(today[name], before[name])


@pytest.mark.parametrize(("ranks", "sharded", "bucket_size"), [(2, True, 1000), (4, True, 5000), (1, False, 3000)])
def test_a_run_goes_on_at_other_numbers_of_ranks(saved, ranks, sharded, bucket_size, tmp_path):
    needs(ranks)
    for got in on_ranks(load, saved[0], sharded, bucket_size, str(tmp_path), ranks=ranks):
        for name in OPTIMIZERS:
            same(got[name], saved[2][name])


@pytest.mark.parametrize(("ranks", "sharded", "form"), [(1, True, "optimizer"), (2, True, "by name"),
                                                        (1, False, "optimizer")])  # fmt: skip
def test_a_run_of_before_goes_on(saved, ranks, sharded, form):
    """Its files, converted; dcp.load itself refuses them by name."""
    needs(ranks)
    _, folder, _, want = saved
    for name in OPTIMIZERS:
        dcp_to_torch_save(f"{folder}/{name}", f"{folder}/{name}.pt")
    for got in on_ranks(convert, folder, sharded, form, ranks=ranks):
        for name in OPTIMIZERS:
            same(got[name], want[name])
            assert "Missing key" in got[name, "model"] and "experts.fc1.weight" in got[name, "model"]
            assert "Missing key" in got[name, "by name"] and "experts.fc1.weight" in got[name, "by name"]
            assert "Size mismatch" in got[name, "optimizer"] and f"{EXPERTS}, {2 * FFN}" in got[name, "optimizer"]


def test_shards_of_before_are_refused(tmp_path):
    for error in on_ranks(part_of_a_file, str(tmp_path / "rank"), ranks=2):
        assert "DistributedOptimizer.load_state_dict" in error and "dcp_to_torch_save" in error
        assert "the state of experts is FlatShard" in error


@pytest.mark.parametrize("before", [False, True], ids=["divided", "joined"])
def test_whole_shards_go_on_in_the_other_form(before):
    ((want, got),) = on_ranks(whole_states, before, ranks=1)
    same(got, want)


def test_experts_that_ranks_divide(saved):
    """Of the mark allreduce=False: the weights, norms and buffers are those of a parameter for each expert."""
    for got, want in zip(on_ranks(beside_ddp, False), on_ranks(beside_ddp, True), strict=True):
        same(got[0], want[0])
        assert got[1] == pytest.approx(want[1], rel=1e-6) and got[2] == want[2] == [EXPERTS // 2 * 3 * FFN * HIDDEN]


@pytest.mark.parametrize("experts", [6, 3])
def test_fsdp2_shards_by_experts(experts):
    whole = [(2 * FFN, HIDDEN), (HIDDEN, FFN)]
    for rank, (local, want, got) in enumerate(on_ranks(sharded_by_fsdp2, experts)):
        count = (experts + 1) // 2 if rank == 0 else experts // 2
        assert local == [(count, *shape) for shape in whole]
        same(got, want)
        assert all(bool(torch.isfinite(t).all()) for t in got.values())
