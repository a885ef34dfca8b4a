# A file of torch.distributed.checkpoint that two ranks wrote goes on, to the bit, at other numbers of ranks and other
# buckets, unsharded, in FusedAdam alone and in FSDP2, and comes back. A shard as boxes of its parameter's shape.
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import at_most, here, on_ranks
from support import assert_same_bits, refused
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel.flat_shard import FlatShard, boxes

from .cases import build
from .file_workers import HELD, fsdp2, load, save

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
CASES = [("plain", "fused_adam"), ("main_grad", "remainders"), ("plain", "fused_sgd"), ("plain", "adamw")]
CASES += [(model, "fused_adam") for model in HELD]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes(shape, data):
    n = math.prod(shape)
    start = data.draw(st.integers(0, n))
    end = data.draw(st.integers(start, n))
    whole = torch.arange(n).view(shape)
    found, parts = [], boxes(shape, start, end)
    for box in parts:
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))].reshape(-1)
        assert part[0] == box.first
        found += part.tolist()
    assert found == list(range(start, end)) and len(parts) <= max(1, 2 * len(shape) - 1)


def test_a_shard_computes_nothing():
    shard = FlatShard(torch.arange(4.0), (3, 2), 1, 5)
    assert shard.shape == (3, 2) and "elements 1 to 5 of [3, 2]" in repr(shard)
    assert [tuple(c.sizes) for c in shard.__create_chunk_list__()] == [(1, 1), (1, 2), (1, 1)]
    with refused(NotImplementedError, "elements 1 to 5", "`local`"):
        shard + 1


def test_a_parameter_without_elements_has_an_entry(tmp_path):
    for shape in ((0, 3), (2, 0)):
        state = {"w": FlatShard(torch.empty(0), shape, 0, 0), "b": torch.ones(1)}
        dcp.save(state, checkpoint_id=f"{tmp_path}/{shape}", no_dist=True)
        dcp.load(state, checkpoint_id=f"{tmp_path}/{shape}", no_dist=True)


def test_a_shard_of_an_older_pickle():
    """It has the attributes of its time."""
    shard = FlatShard(torch.arange(4.0), (3, 2), 1, 5)
    del shard.own_shape, shard.cut
    assert shard.place == ((3, 2), 1, 5, None) and "elements 1 to 5 of [3, 2]" in repr(shard)
    assert [tuple(c.sizes) for c in shard.__create_chunk_list__()] == [(1, 1), (1, 2), (1, 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dcp"))
    return folder, on_ranks(save, folder, CASES, ranks=2)


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        for key, value in wanted[name].items():
            assert value.isfinite().all(), f"{name}: {key}"
            assert_same_bits(got[name][key], value, f"{name}: {key}")


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "sharded", "bucket_size"), [(2, True, 400), (1, True, 1100), (3, True, 1100),
                                                              (4, True, 2000), (2, False, 1100)])  # fmt: skip
def test_a_run_goes_on(saved, ranks, sharded, bucket_size):
    if at_most(ranks) < ranks:
        pytest.skip(f"needs {ranks} devices")
    folder, wanted = saved
    for got in on_ranks(load, folder, CASES, sharded, bucket_size, ranks=ranks):
        same(got, wanted[0])


@pytest.mark.dist
def test_the_unsharded_optimizer_and_fsdp2_take_it(saved):
    folder, _ = saved
    module = build("plain")
    adam = te.optimizers.FusedAdam(module.parameters(), master_weights=True)
    for p in module.parameters():
        adam.initialize_state(p)
    adam.param_groups[0]["step"] = 0  # as in one that has taken a step: what is not there is not loaded
    state = {"optimizer": get_optimizer_state_dict(module, adam)}
    dcp.load(state, checkpoint_id=f"{folder}/plain, fused_adam", no_dist=True)
    assert state["optimizer"]["param_groups"][0]["step"] == 2
    names = dict(module.named_parameters())
    assert any(bool(value.any()) for value in state["optimizer"]["state"]["first.weight"].values())
    for whole in on_ranks(fsdp2, folder, ranks=2):
        for name in names:
            for key, value in whole[name].items():
                assert_same_bits(value, state["optimizer"]["state"][name][key].to(here()).cpu(), f"{name}: {key}")
