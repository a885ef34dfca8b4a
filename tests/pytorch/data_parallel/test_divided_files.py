# Files of torch.distributed.checkpoint that two replicas wrote go on, to the bit, with a model that two ranks share by
# tensor parallelism, and back: weights, and states of each optimizer, sharded or not. Parameters are divided along
# either dimension, whole, stacked and tied.
import pytest
import torch
from ranks import on_ranks
from support import refused

from transformer_engine.pytorch.data_parallel.flat_shard import Cut, FlatShard

from .divided_file_workers import there_and_back

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
CASES = [("fused_adam", True), ("fused_adam", False), ("adamw", True)]


@pytest.mark.dist
def test_two_replicas_two_parts_two_replicas(tmp_path):
    assert on_ranks(there_and_back, str(tmp_path), CASES, ranks=2) == [True, True]


def test_pieces_of_all_ranks_are_the_whole():
    """Of every cut into shards: each element once, where it belongs."""
    whole = torch.arange(6 * 8).view(6, 8)
    for dim, sizes in ((0, (6,)), (0, (2, 4)), (1, (8,)), (1, (2, 4, 2))):
        found, ranks = torch.full_like(whole, -1), 2
        for rank in range(ranks):
            own = torch.cat([part.chunk(ranks, dim)[rank] for part in whole.split(sizes, dim)], dim)
            cut = Cut(dim, rank, ranks, tuple(size // ranks for size in sizes))
            for start, end in ((0, 5), (5, 6), (6, 17), (17, 24)):
                shard = FlatShard(own.reshape(-1)[start:end], own.shape, start, end, cut)
                assert shard.shape == whole.shape and f"part {rank} of 2 of [6, 8]" in repr(shard)
                for offsets, values in shard._pieces():
                    place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape))
                    assert (found[place] == -1).all()
                    found[place] = values
        assert torch.equal(found, whole), (dim, sizes)


def test_a_part_that_is_not_there():
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shard = FlatShard(torch.zeros(4), (2, 2), 0, 4, Cut(1, 1, 2, (2,)))
    assert shard.__get_tensor_shard__(MetadataIndex("w", (0, 2))).shape == (2, 2)
    with refused(ValueError, "no part of 'w' begins at", "[(0, 2)]"):
        shard.__get_tensor_shard__(MetadataIndex("w", (0, 0)))
