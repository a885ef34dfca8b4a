# Steps by one process, in which collectives do nothing, beside the optimizer alone; the order of steps and gathers.
import pytest
import torch
from ranks import here
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from transformer_engine.pytorch.data_parallel.norm import clip_factor
from transformer_engine.pytorch.tensor.utils import post_all_gather_processing

from . import fake
from .fake import FakeCommunicator, ladder

Config = DistributedDataParallelConfig
SHARDS = pytest.mark.parametrize("sharded", [False, True])


def step(ddp, optimizer, x):
    optimizer.zero_grad()
    ddp(x).square().sum().backward()
    optimizer.step()


def step_alone(module, optimizer, x):
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def wrapped(module, make, sharded):
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=sharded), module)
    return ddp, DistributedOptimizer(make(module.parameters()), ddp)


@SHARDS
@pytest.mark.parametrize("loads", [(0,), (1,), (0, 1, 2)])
def test_a_load_changes_no_damped_step(sharded, loads):
    """The first step of a momentum is not damped: after a load as without it, and after a step that was skipped."""

    def sgd(params):
        return te.optimizers.FusedSGD(params, lr=0.25, momentum=0.5, dampening=0.5)

    module, alone = ladder(2, 4).to(here()), ladder(2, 4).to(here())
    alone.load_state_dict(module.state_dict())
    (ddp, optimizer), its_optimizer = wrapped(module, sgd, sharded), sgd(alone.parameters())
    for number in range(3):
        x = torch.full((1, 4), 1.0 + number, device=here())
        if number in loads:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.found_inf = torch.ones(1, device=here())
        step(ddp, optimizer, x)
        optimizer.found_inf = None
        step(ddp, optimizer, x)
        step_alone(alone, its_optimizer, x)
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q), f"step {number}: {p}, wanted {q}"


OPTIMIZERS = {
    "FusedAdam": lambda params: te.optimizers.FusedAdam(params, lr=0.25),
    "FusedSGD": lambda params: te.optimizers.FusedSGD(params, lr=0.25, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.25, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, foreach=False),
}


@SHARDS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_in_another_order_of_memory(sharded, name):
    """channels_last, whose main_grad is contiguous: steps and states are those of the optimizer alone."""
    make = OPTIMIZERS[name]
    module, alone = (torch.nn.Conv2d(3, 4, 3, bias=False).to(here(), memory_format=torch.channels_last) for _ in "ab")
    alone.load_state_dict(module.state_dict())
    (ddp, optimizer), its_optimizer = wrapped(module, make, sharded), make(alone.parameters())
    for _ in range(3):
        x = torch.randn(2, 3, 4, 4, device=here())
        step_alone(alone, its_optimizer, x)
        optimizer.zero_grad()
        module.weight.main_grad.copy_(alone.weight.grad)
        ddp.param_to_bucket_group[module.weight].register_grad_ready(module.weight)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(module.weight, alone.weight)
        if not sharded:
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
    its = its_optimizer.state[alone.weight]
    for key, value in optimizer.state_dict()["state"][0].items():
        if not sharded and key in its:
            assert torch.equal(value, its[key].view_as(value)), key


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_weights_with_gaps(name):
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight = torch.nn.Parameter(torch.randn(4, 8)[:, ::2])
    with refused(ValueError, "'weight'", "(8, 2)", "(4, 1)", name):
        wrapped(module, OPTIMIZERS[name], False)


def test_counts_of_torchs_adam():
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=True), ladder(1, 4))
    optimizer = DistributedOptimizer(te.optimizers.FusedAdam(ddp.module.parameters()), ddp)
    state = optimizer.state_dict()
    for its in state["param_groups"]:
        its.pop("step", None)
    for its in state["state"].values():
        its["step"] = torch.tensor(7.0)
    optimizer.load_state_dict(state)
    assert [int(step) for step in optimizer._steps.steps] == [7]


class Watching(FakeCommunicator):
    """Notes which groups' shards a step has written when a gather starts."""

    def watch(self, ddp):
        self.groups = ddp.bucket_groups
        self.before = [self.shard(group).clone() for group in self.groups]
        self.seen = []

    @staticmethod
    def shard(group):
        (bucket,) = group.buckets
        return bucket.own_shard(bucket.param_data)

    def all_gather(self, whole, shard):
        stepped = [not torch.equal(self.shard(g), b) for g, b in zip(self.groups, self.before, strict=True)]
        self.seen.append([i for i, moved in enumerate(stepped) if moved])
        return super().all_gather(whole, shard)


def test_a_gather_starts_before_the_next_group_is_stepped(monkeypatch):
    """With overlap_param_gather_with_optimizer_step: that of the group which a forward reads first leaves first."""
    comm, module = Watching(), ladder()
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = fake.wrapped(monkeypatch, comm, module, bucket_size=1, **options)
    inner = te.optimizers.FusedAdam(module.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, ddp, overlap_param_gather_with_optimizer_step=True)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(1, 16)).sum().backward()
        comm.watch(ddp)
        optimizer.step()
        assert comm.seen == [[2], [1, 2], [0, 1, 2]]  # the last bucket is that of the first layer
        assert len(comm.in_flight()) == 3


def test_a_forward_waits_for_each_of_its_groups(monkeypatch):
    """One of them is whole already."""
    comm, layer = FakeCommunicator(), torch.nn.Linear(16, 16)
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = fake.wrapped(monkeypatch, comm, layer, bucket_size=1, **options)
    for p, other in ((layer.weight, layer.bias), (layer.bias, layer.weight)):
        ddp.reset_param_sync_dispatch_state()
        ddp.param_to_bucket_group[p].start_param_sync(force_sync=True)
        assert ddp.param_to_bucket_group[other].is_stale
        ddp(torch.ones(1, 16))
        assert not any(group.is_stale for group in ddp.bucket_groups) and not comm.in_flight()


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_parameters_without_dimensions_or_elements(shape):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.weight = (torch.nn.Parameter(torch.ones(each, device=here())) for each in (shape, (4,)))

        def forward(self, x):
            return (self.weight * x).sum() + 2.0 * self.scale.sum()

    ddp = DistributedDataParallel(Config(overlap_grad_reduce=True, use_distributed_optimizer=True), Scaled())
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(4, device=here())).backward()
        ddp.finish_grad_sync()
        assert (ddp.module.scale.main_grad == 2.0).all() and (ddp.module.weight.main_grad == 1.0).all()


@SHARDS
@pytest.mark.parametrize("recipe", [Float8BlockScaling, Float8CurrentScaling])
def test_both_directions_of_fp8_weights_are_stepped(recipe, sharded):
    with te.quantized_model_init(True, recipe(), preserve_high_precision_init_val=True):
        layer = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device=here())
    ddp, optimizer = wrapped(
        layer, lambda params: te.optimizers.FusedAdam(params, lr=0.1, master_weights=True), sharded
    )

    def columns():
        return layer.weight.get_data_tensors(rowwise_data=True, columnwise_data=True)[1].clone()

    for _ in range(2):
        optimizer.zero_grad()
        with te.autocast(recipe=recipe()):
            ddp(torch.ones(32, 256, dtype=torch.bfloat16, device=here(), requires_grad=True)).sum().backward()
        before = columns()
        optimizer.step()
        stepped = columns()
        post_all_gather_processing([layer.weight])
        assert torch.equal(stepped, columns()) and not torch.equal(stepped, before)


@pytest.mark.parametrize(("width", "sharded"), [(32, False), (32, True), (24, False), (24, True)])
@pytest.mark.parametrize("recipe", [Float8BlockScaling, Float8CurrentScaling])
def test_fp8_weights_train_as_bf16_weights_that_each_forward_quantizes(recipe, width, sharded):
    """Also where rows are off 16 bytes: each weight that is held in FP8 is the quantized bf16 weight of the other."""
    losses, modules = ([], []), []
    for held in (True, False):
        torch.manual_seed(3)
        with te.quantized_model_init(held, recipe(), preserve_high_precision_init_val=True):
            options = {"bias": False, "params_dtype": torch.bfloat16, "device": here()}
            modules.append(torch.nn.Sequential(te.Linear(width, 48, **options), te.Linear(48, width, **options)))
    with torch.no_grad():
        for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            q.copy_(p.get_high_precision_init_val())
    for module, found in zip(modules, losses):
        ddp, optimizer = wrapped(
            module, lambda params: te.optimizers.FusedAdam(params, lr=0.05, master_weights=True), sharded
        )
        for number in range(4):
            x = torch.randn(16, width, generator=torch.Generator().manual_seed(number)).to(here(), torch.bfloat16)
            optimizer.zero_grad()
            with te.autocast(recipe=recipe()):
                loss = ddp(x).float().square().mean()
            loss.backward()
            found.append((float(loss.detach()), float(optimizer.step())))
    assert losses[0] == losses[1] and losses[0][-1] != losses[0][0]


def test_the_factor_of_a_small_norm_is_that_of_torch():
    gradient = torch.nn.Parameter(torch.zeros(1))
    for norm in (0.0, 1e-6, 3e-6, 1.0):
        gradient.grad = torch.full((1,), norm)
        torch.nn.utils.clip_grad_norm_([gradient], 1e-6)
        factor = clip_factor(torch.tensor(norm), 1e-6, None)
        torch.testing.assert_close(factor * norm, gradient.grad)


@pytest.mark.parametrize("moves", [False, True])
def test_whole_weights_that_move(moves):
    """A step writes the memory that the weights had when the optimizer was made."""
    module = torch.nn.Linear(4, 4, device=here())
    ddp, optimizer = wrapped(module, lambda params: torch.optim.SGD(params, lr=1.0), False)
    module.load_state_dict(module.state_dict())
    step(ddp, optimizer, torch.ones(2, 4, device=here()))
    if not moves:
        return
    module.bfloat16()
    for call in (optimizer.zero_grad, optimizer.step):
        with refused(RuntimeError, "'weight' has moved to other memory", "after .to() and casts"):
            call()
