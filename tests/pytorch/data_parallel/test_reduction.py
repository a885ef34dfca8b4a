# Sums in the order of the ranks, of dense parameters over two ranks of the fake and of experts over one rank.
import copy

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    wrapper,
)
from transformer_engine.pytorch.data_parallel.communicator import Communicator

from .fake import FakeCommunicator, ladder, wrapped


@pytest.mark.parametrize("expert", [2, 1, 0], ids=["first", "between", "last"])
def test_experts_of_one_rank_beside_dense_sums(monkeypatch, expert):
    """Where waits block the host, a backward waits for none of the dense sums, whichever bucket starts after them."""
    fake = FakeCommunicator()
    monkeypatch.setattr(
        wrapper,
        "Communicator",
        lambda argument, _: Communicator(argument, None) if argument == "expert_process_group" else fake,
    )
    module = ladder(3)
    alone = copy.deepcopy(module)
    alone(torch.ones(1, 16)).sum().backward()
    module[expert].weight.allreduce = False
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1, reproducible=True)
    ddp = DistributedDataParallel(config, module, expert_process_group=object())
    for _ in range(3):
        ddp.zero_grad_buffer()
        fake.log.clear()
        ddp(torch.ones(1, 16)).sum().backward()
        assert not [what for what, *_ in fake.log if what == "wait"]
        ddp.finish_grad_sync()
        assert not fake.in_flight()
        for i, (p, wanted) in enumerate(zip(module.parameters(), alone.parameters(), strict=True)):
            rows, factor = (16, 0.5) if i == expert else (8, 1.0)  # the fake has no sums of rank 1
            torch.testing.assert_close(p.main_grad[:rows], wanted.grad[:rows] * factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_equal_slices_lose_nothing(monkeypatch, ranks, dtype):
    """Of 16 bits: a sum that is rounded before it is divided by three differs."""
    layer = torch.nn.Linear(96, 4, bias=False, dtype=dtype)
    ddp = wrapped(monkeypatch, FakeCommunicator(ranks), layer, use_distributed_optimizer=True, reproducible=True)
    ddp.zero_grad_buffer()
    values = 1.0 + torch.arange(layer.weight.numel()).remainder(128) / 128
    layer.weight.main_grad.copy_(values.view(4, 96))
    ddp.finish_grad_sync()
    (bucket,) = ddp.bucket_groups[0].buckets
    own = bucket.own_shard(bucket.grad_data)
    torch.testing.assert_close(
        own.float(), values[: own.numel()], rtol=0 if own.dtype is torch.bfloat16 else 1e-6, atol=0
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_counts_experts_once(monkeypatch, sharded):
    """Four ranks, of which pairs hold the same experts. The ranks of the fake have the same sums."""
    groups = {"process_group": FakeCommunicator(4), "expert_process_group": FakeCommunicator(2)}
    monkeypatch.setattr(wrapper, "Communicator", lambda argument, _: groups[argument])
    module = torch.nn.ParameterList([torch.ones(128 * 4), torch.ones(128 * 4)])
    module[1].allreduce = False
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    ddp = DistributedDataParallel(config, module, expert_process_group=object(), calculate_per_token_loss=True)
    optimizer = DistributedOptimizer(te.optimizers.FusedAdam(module.parameters()), ddp)
    optimizer.zero_grad()
    for p in module:
        p.main_grad.fill_(1.0)
    norm = optimizer.step()  # sums over ranks: of 4 and of 2; experts of two pairs
    assert float(norm) ** 2 == pytest.approx(512 * 4.0**2 + 2 * 512 * 2.0**2)
