# Fused optimizers under FSDP2, on two processes: the weights of one process that sees both halves of the data, states
# that are DTensors, resumed from DCP bit for bit.
import pytest
import torch
from rank_workers import batch_of, fresh
from ranks import on_ranks
from support import assert_same_bits

from ..tensor.workers import FSDP_SHAPES, Layer, batch
from . import workers
from .workers import FAMILY, PLAIN, QUANTIZED, STEPS

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(workers.everything, str(tmp_path_factory.mktemp("dcp")))


@pytest.mark.parametrize("name", PLAIN)
def test_trains_as_one_process_does(ranks, name):
    """Gradients of halves are rounded before they are added, and Adam makes full steps of pure rounding errors (the
    gradient of a key's bias): the sharded weights are where those of one process are, within a tenth of the way there.
    """
    module = fresh(FAMILY)
    before = {key: p.detach().clone() for key, p in module.named_parameters()}
    optimizer = PLAIN[name](module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            module(batch_of(FAMILY, step, rank)).float().square().mean().backward()
        for p in module.parameters():
            p.grad /= 2
        optimizer.step()
    for results in ranks:
        way = sum((before[key] - p.detach()).square().sum() for key, p in module.named_parameters())
        off = sum(
            (results["plain"][name][key] - p.detach().cpu()).square().sum() for key, p in module.named_parameters()
        )
        assert way > 0 and off.sqrt() < 0.1 * way.sqrt()
    for key, _ in module.named_parameters():
        assert_same_bits(ranks[0]["plain"][name][key], ranks[1]["plain"][name][key], key)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_train_as_one_process_does(ranks, name):
    """Gradients are whole numbers, halved: exact, so the bits are the same."""
    module = Layer(name, FSDP_SHAPES[name])
    optimizer = workers.adam_of(module.weight)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            module(batch(step, rank, FSDP_SHAPES[name])).sum().backward()
        module.weight.grad /= 2
        optimizer.step()
    rows = -(-FSDP_SHAPES[name][0] // 2)
    for rank, results in enumerate(ranks):
        wanted = module.weight.dequantize()[rank * rows : (rank + 1) * rows]
        assert_same_bits(results["quantized"][name], wanted.detach(), f"rank {rank}")
    assert torch.unique(module.weight.dequantize()).numel() > 2


def test_a_gradient_that_lies_otherwise_is_cut_as_the_weight_is(ranks):
    for results in ranks:
        assert_same_bits(*results["otherwise"])
