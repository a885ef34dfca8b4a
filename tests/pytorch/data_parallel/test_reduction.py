# Sums in the order of the ranks, of dense parameters over two ranks of the fake and of experts over one rank.
import copy

import pytest
import torch

from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, wrapper
from transformer_engine.pytorch.data_parallel.communicator import Communicator

from .fake import FakeCommunicator, ladder


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
