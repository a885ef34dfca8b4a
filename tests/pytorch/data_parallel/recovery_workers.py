# Workers of test_recovery.py: steps that some rank does not finish, flags and norms of one rank alone.
import contextlib
import datetime

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)

from .cases import each, raised
from .optimizer_workers import adamw, fused_adam, fused_sgd, sgd

LAYERS, WIDTH = 4, 16
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 1}
ORDERED = {"reproducible": True}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


class Ladder(torch.nn.Module):
    """Weights of ones: the gradient of each is a whole number. fails: the layer before which a backward ends."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False, device=here()) for _ in range(layers)
        )
        for p in self.parameters():
            torch.nn.init.eye_(p)
        self.fails = None

    def forward(self, x, until=None, since=0):
        for i, layer in enumerate(self.layers[since:until], since):
            x = layer(Fails.apply(x) if i == self.fails else x)
        return x


def made(sharded=False, group=None, module=None, **options):
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **{**OVERLAPPED, **options})
    return DistributedDataParallel(config, module or Ladder(), process_group=group)


def own_gradients(ddp):
    """Of this rank's shards, or whole."""
    return torch.cat([
        (bucket.own_shard(bucket.grad_data) if group.is_sharded else bucket.grad_data).view(-1)[:16]
        for group in ddp.bucket_groups
        for bucket in group.buckets
    ])  # fmt: skip


def step(ddp, value):
    """Gradients of `value` everywhere, on each rank."""
    ddp.zero_grad_buffer()
    x = torch.full((1, WIDTH), value, device=here(), dtype=next(ddp.module.parameters()).dtype)
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    got = own_gradients(ddp)
    assert (got == value).all(), got


def fail(ddp, layer):
    ddp.zero_grad_buffer()
    ddp.module.fails = layer
    x = torch.ones(1, WIDTH, device=here(), dtype=next(ddp.module.parameters()).dtype)
    raised(ZeroDivisionError, lambda: ddp(x).sum().backward())
    ddp.module.fails = None


def ended_backward(rank, ranks):
    """Each rank's backward ends at another layer; the next steps have the right gradients, on all ranks."""
    for sharded, options in ((False, {}), (True, {}), (True, ORDERED), (True, {"check_for_nan_in_grad": True})):
        ddp = made(sharded, **options)
        step(ddp, 1.0)
        for layers in ((1, 1), (3, 2), (2, 3), (1, 3)):
            fail(ddp, layers[rank % 2])
            step(ddp, 3.0)
            step(ddp, 2.0)


def ended_backward_of_ordered_sums(rank, ranks):
    """A backward waits for no sum of another rank, whose backward has ended before it or has skipped it."""
    for options in (ORDERED, {"reduce_scatter_with_fp32_accumulation": True}):
        for sharded, find_unused in ((False, False), (True, False), (True, True)):
            module = Ladder(8).to(torch.float32 if options is ORDERED else torch.bfloat16)
            ddp = made(sharded, module=module, find_unused_parameters=find_unused, **options)
            step(ddp, 1.0)
            for layers in ((1, 7), (6, 1)):
                fail(ddp, layers[rank % 2])
                step(ddp, 3.0)
            if find_unused:
                ddp.zero_grad_buffer()
                x = torch.ones(1, WIDTH, device=here(), dtype=next(module.parameters()).dtype)
                ddp(x, *((None, 5) if rank else (5,))).sum().backward()  # no step
                step(ddp, 2.0)


def ended_first_backward(rank, ranks):
    ddp = made(sharded=True)
    fail(ddp, 1)
    for _ in range(3):
        step(ddp, 2.0)
    assert all(count == 1 for group in ddp.bucket_groups for count in group.expected.values())


def ended_backward_of_an_optimizer(rank, ranks):
    """zero_grad() leaves the step, and drops one whose gradients are complete."""
    ddp = made(sharded=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(fused_sgd(ddp.module.parameters()), ddp)
    before = None
    for ends in (None, 1, "complete", None):
        optimizer.zero_grad()
        if ends == 1:
            ddp.module.fails = 1 + rank
            raised(ZeroDivisionError, lambda: ddp(torch.ones(1, WIDTH, device=here())).sum().backward())
            ddp.module.fails = None
            continue
        ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
        if ends == "complete":
            continue
        before = {n: p.clone() for n, p in ddp.state_dict().items()}
        optimizer.step()
    assert not any(torch.equal(p, before[n]) for n, p in ddp.state_dict().items())


def one_rank_leaves(rank, ranks):
    """One rank leaves a step that the others finish: each gets an error that names the reason."""
    group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=5))
    ddp = made(group=group)
    step(ddp, 1.0)
    if rank == 0:
        fail(ddp, 1)
        text = raised(RuntimeError, ddp.zero_grad_buffer)
        assert "ranks [1]" in text and "every rank leaves" in text, text
    else:
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
        text = raised(RuntimeError, ddp.finish_grad_sync)
        assert "rank 0" in text and "zero_grad_buffer() was called after a backward" in text, text


def one_rank_lacks_a_gradient(rank, ranks):
    """After the first step: its sentence reaches the others within the group's timeout."""
    group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=5))
    ddp = made(group=group)
    step(ddp, 1.0)
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, WIDTH, device=here()), until=LAYERS - rank).sum().backward()
    text = raised(RuntimeError, ddp.finish_grad_sync)
    assert "1 of 4 parameters" in text and "'layers.3.weight'" in text, text
    assert rank == 1 or "rank 1" in text


def first_step_held_back(rank, ranks):
    """All microbatches under no_sync(): reduced at the end; counts are those of a later step."""
    for find_unused in (False, True):
        ddp = made(find_unused_parameters=find_unused)
        for number in range(5):
            ddp.zero_grad_buffer()
            for held_back in (True, number in (0, 3)):
                with ddp.no_sync() if held_back else contextlib.nullcontext():
                    ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
            overlapped = number in (2, 4)
            states = {group.state.name for group in ddp.bucket_groups}
            assert states == ({"IN_FLIGHT"} if overlapped else {"ACCUMULATING"}), (number, states)
            ddp.finish_grad_sync()
            ddp.finish_grad_sync()
            assert (own_gradients(ddp) == 2.0).all()


def held_back_on_one_rank(rank, ranks):
    ddp = made()
    ddp.zero_grad_buffer()
    with ddp.no_sync() if rank else contextlib.nullcontext():
        ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
    text = raised(RuntimeError, ddp.finish_grad_sync)
    assert "no_sync() on ranks [1]" in text and "the same on all ranks" in text, text


def a_part_that_is_wrapped_again(rank, ranks):
    """The earlier wrapper leaves whole weights, and raises by name from then on, as its optimizer does."""
    ddp = made(True, overlap_param_gather=True, debug=True)
    optimizer = DistributedOptimizer(fused_sgd(ddp.module.parameters()), ddp)
    optimizer.zero_grad()
    x = torch.ones(1, WIDTH, device=here())
    ddp(x).sum().backward()
    optimizer.step()
    module = ddp.module
    later = DistributedDataParallel(DistributedDataParallelConfig(), module.layers[2])
    assert all(p.isfinite().all() for p in module.parameters())
    before = [p.clone() for p in module.parameters()]
    calls = {
        "forward()": lambda: ddp(x),
        "zero_grad_buffer()": ddp.zero_grad_buffer,
        "start_grad_sync()": ddp.start_grad_sync,
        "finish_grad_sync()": ddp.finish_grad_sync,
        "enable_forward_pre_hook()": ddp.enable_forward_pre_hook,
        "zero_grad() of a DistributedOptimizer": optimizer.zero_grad,
        "step() of a DistributedOptimizer": optimizer.step,
        "DistributedOptimizer": lambda: DistributedOptimizer(fused_sgd(module.parameters()), ddp),
    }
    for name, call in calls.items():
        text = raised(RuntimeError, call)
        assert f": {name} was called" in text and "'layers.2.weight' was wrapped again" in text, text
    later.zero_grad_buffer()
    later(x).sum().backward()
    later.finish_grad_sync()
    assert (module.layers[2].weight.main_grad == 1.0).all()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before))


def a_damped_step_after_a_load(rank, ranks):
    """Also on a rank whose gradients were zeros in the first step."""
    runs = []
    for loads in (False, True):
        ddp = made(True, module=Ladder(2), bucket_size=None)  # of a bucket of two layers each rank has one
        sgd = te.optimizers.FusedSGD(ddp.module.parameters(), lr=0.5, momentum=0.5, dampening=0.5)
        optimizer = DistributedOptimizer(sgd, ddp)
        for number in range(3):
            optimizer.zero_grad()
            zero = 0.0 if number == 0 else 1.0
            ddp.module.layers[0].weight.register_hook(lambda grad, zero=zero: grad * zero)
            ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
            optimizer.step()
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append(list(ddp.state_dict().values()))
    assert all(torch.equal(p, q) for p, q in zip(*runs)), runs


def flag_of_one_rank(rank, ranks):
    """found_inf is set on one rank, and None on the other."""
    for make in (fused_adam, fused_sgd, adamw, sgd):
        for sharded in (False, True):
            ddp = made(sharded)
            optimizer = DistributedOptimizer(make(ddp.module.parameters()), ddp)
            for skip in (False, True, False):
                before = {n: p.clone() for n, p in ddp.state_dict().items()}
                optimizer.zero_grad()
                ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
                optimizer.found_inf = torch.ones((), device=here()) if skip and rank == 1 else None
                optimizer.step()
                same = [torch.equal(p, before[n]) for n, p in ddp.state_dict().items()]
                assert all(same) if skip else not any(same), (make.__name__, sharded, same)


def nan_of_a_tensor_parallel_rank(rank, ranks):
    """Data-parallel groups of one rank, two tensor-parallel ranks: one has a NaN, both skip, both raise."""
    own = [dist.new_group([r]) for r in range(ranks)][rank]
    for given in ({"tp_group": dist.group.WORLD}, {"tp_group": dist.group.WORLD, "grad_stats_group": dist.group.WORLD}):
        ddp = made(True, own, check_for_nan_in_grad=True)
        optimizer = DistributedOptimizer(fused_adam(ddp.module.parameters()), ddp, **given)
        for bad in (False, True, False):
            before = {n: p.clone() for n, p in ddp.state_dict().items()}
            optimizer.zero_grad()
            factor = torch.nan if bad and rank == 1 else 1.0
            (ddp(torch.ones(1, WIDTH, device=here())) * factor).sum().backward()
            optimizer.step()
            same = [torch.equal(p, before[n]) for n, p in ddp.state_dict().items()]
            assert all(same) if bad else not any(same)
            if bad:
                text = raised(RuntimeError, optimizer.zero_grad)
                assert "'layers." in text and "rank 1" in text and "not finite" in text, text


def nan_that_is_raised_later(rank, ranks):
    """By the wrapper's own call, and after another backward."""
    for later in ("zero_grad_buffer", "backward"):
        ddp = made(True, check_for_nan_in_grad=True)
        optimizer = DistributedOptimizer(fused_adam(ddp.module.parameters()), ddp)
        for bad in (False, True):
            optimizer.zero_grad()
            factor = torch.inf if bad and rank == 0 else 1.0
            (ddp(torch.ones(1, WIDTH, device=here())) * factor).sum().backward()
            optimizer.step()
        if later == "backward":
            for group in ddp.bucket_groups:
                group.reset()
            ddp._order.begin()
            ddp.buffers[0].reset()
            ddp(torch.ones(1, WIDTH, device=here())).sum().backward()
        text = raised(RuntimeError, ddp.zero_grad_buffer if later == "zero_grad_buffer" else optimizer.step)
        assert "rank 0" in text and "not finite" in text, text


def nan_that_was_raised(rank, ranks):
    """finish_grad_sync() raises, and step() skips; the next step's NaN is raised again."""
    ddp = made(True, check_for_nan_in_grad=True)
    optimizer = DistributedOptimizer(fused_adam(ddp.module.parameters()), ddp)
    for _ in range(2):
        for early in (True, False):
            optimizer.zero_grad()
            factor = torch.nan if rank == 1 else 1.0
            (ddp(torch.ones(1, WIDTH, device=here())) * factor).sum().backward()
            before = {n: p.clone() for n, p in ddp.state_dict().items()}
            if early:
                assert "rank 1" in raised(RuntimeError, ddp.finish_grad_sync)
            optimizer.step()
            assert all(torch.equal(p, before[n]) for n, p in ddp.state_dict().items())
        assert "rank 1" in raised(RuntimeError, optimizer.zero_grad)


def branches(rank, ranks):
    """Ranks skip different parts of the forward: gathers and reductions have one order all the same."""
    ddp = made(True, overlap_param_gather=True, find_unused_parameters=True)
    optimizer = DistributedOptimizer(fused_sgd(ddp.module.parameters()), ddp)
    alone = Ladder()
    its_optimizer = fused_sgd(alone.parameters())
    x = torch.ones(1, WIDTH, device=here())
    for number in range(6):
        untils = [1 if (number + r) % 2 else LAYERS for r in range(ranks)]
        optimizer.zero_grad()
        ddp(x, until=untils[rank]).sum().backward()
        optimizer.step()
        its_optimizer.zero_grad()
        for until in untils:
            (alone(x, until=until).sum() / ranks).backward()
        for p in alone.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        its_optimizer.step()
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


def several_process_groups(rank, ranks):
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    ddps = [made(group=group) for group in groups]
    params = [p for ddp in ddps for p in ddp.module.parameters()]
    text = raised(ValueError, lambda: DistributedOptimizer(fused_sgd(params), ddps))
    assert "'ddps'" in text and "several process groups" in text, text


def counts_of_absent_shards(rank, ranks):
    """A rank without elements of a parameter saves the parameter's own count, after a load and after later steps."""
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False, device=here()) for _ in range(2)))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(config, module)
    groups = [{"params": [p]} for p in module.parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam(groups, foreach=False), ddp)
    assert sorted(len(own) for own in optimizer._shards) == [0, 1]  # each rank has one of the two
    copies = [torch.nn.Parameter(p.detach().clone()) for p in module.parameters()]
    plain = torch.optim.Adam([{"params": [p]} for p in copies], foreach=False)
    for p in copies:
        p.grad = torch.ones_like(p)
    plain.step()
    state = plain.state_dict()
    for number, steps in enumerate((5.0, 9.0)):
        state["state"][number]["step"].fill_(steps)
    optimizer.load_state_dict(state)
    for done in (0, 1, 2):
        got = [float(optimizer.state_dict()["state"][i]["step"]) for i in range(2)]
        assert got == [5.0 + done, 9.0 + done], got
        optimizer.zero_grad()
        ddp(torch.ones(1, 16, device=here())).sum().backward()
        optimizer.found_inf = torch.tensor(float(done == 2), device=here())
        optimizer.step()
    got = [float(optimizer.state_dict()["state"][i]["step"]) for i in range(2)]
    assert got == [7.0, 11.0], got  # the last one was skipped


CASES = {
    call.__name__: call
    for call in (
        ended_backward,
        ended_backward_of_ordered_sums,
        ended_first_backward,
        ended_backward_of_an_optimizer,
        first_step_held_back,
        held_back_on_one_rank,
        a_part_that_is_wrapped_again,
        a_damped_step_after_a_load,
        flag_of_one_rank,
        nan_of_a_tensor_parallel_rank,
        nan_that_is_raised_later,
        nan_that_was_raised,
        branches,
        several_process_groups,
        counts_of_absent_shards,
        one_rank_leaves,
        one_rank_lacks_a_gradient,
    )
}


def everything(rank, ranks, names):
    return each(rank, ranks, {name: (CASES[name], ()) for name in names})
