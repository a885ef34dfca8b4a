# DDP and FSDP2 around every module family, on two processes: the bits of one process that sees both halves of
# the data. Mutant: a parameter that a module copies instead of using it (noop_cat of a detached one) turns these red.
import pytest
import rank_workers
import torch
import torch.distributed.checkpoint as dcp
from families import FAMILIES, loss_of
from ranks import here, on_ranks
from support import assert_same_bits

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def alone(name):
    """One process: gradients of both halves, averaged. Halving is exact, so the order of sum and mean is none."""
    module = rank_workers.fresh(name)
    optimizer, losses = rank_workers.optimizer_of(module), ([], [])
    for step in range(rank_workers.STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            loss = loss_of(module(rank_workers.batch_of(name, step, rank)))
            loss.backward()
            losses[rank].append(loss.detach().view(1))
        for p in module.parameters():
            p.grad /= 2
        optimizer.step()
    return losses, {key: p.detach() for key, p in module.named_parameters()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp")
    return folder, {"DDP": on_ranks(rank_workers.ddp), "FSDP2": on_ranks(rank_workers.fsdp2, str(folder))}


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_trains_as_one_process_does(results, name, how):
    losses, parameters = alone(name)
    for rank, got in enumerate(results[1][how]):
        got_losses, got_parameters = got[name]
        for one, two in zip(got_losses, losses[rank], strict=True):
            assert_same_bits(one, two, f"rank {rank}: loss")
        assert list(got_parameters) == list(parameters)
        for key, want in parameters.items():
            assert_same_bits(got_parameters[key], want, f"rank {rank}: {key}")
    fresh = dict(rank_workers.fresh(name).named_parameters())
    assert all(not torch.equal(p, fresh[key]) for key, p in parameters.items() if "key_bias" not in key)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sharded_checkpoint_loads_into_a_whole_module(results, name):
    folder, trained = results
    module = FAMILIES[name](device=here())
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder / name)
    module.load_state_dict(state)
    for key, p in module.named_parameters():
        assert_same_bits(p.detach(), trained["FSDP2"][0][name][1][key], key)
