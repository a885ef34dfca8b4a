# Workers of test_wrapper.py: each case by itself, so that one that fails does not end the others.
import contextlib
import copy
import itertools
from functools import partial

import torch
import torch.distributed as dist
from ranks import here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ensure_params_ready,
)

from .cases import MODELS, RECIPES, backward, batch, build, each, own_part, raised, reference

MODES = {
    "sum": {},
    "average": {"average_in_collective": True},
    "fp32 accumulation": {"reduce_scatter_with_fp32_accumulation": True},
    "reproducible": {"reproducible": True},
    "per token": {},
}


def grid(ranks=2):
    """Every model sharded or not, overlapped or not, with each sum, and one or two microbatches; less of it on other
    numbers of ranks."""
    models, modes, microbatches = MODELS, MODES, (1, 2)
    if ranks != 2:
        models, modes, microbatches = ("plain", "main_grad"), ("sum", "average", "reproducible"), (2,)
    cases = [
        case
        for case in itertools.product(models, (False, True), (False, True), modes, microbatches)
        if case[0] not in RECIPES or case[3:] == ("sum", 2)
    ]
    return {
        f"{model}, {'sharded' if sharded else 'whole'}, {'overlapped' if overlap else 'serial'}, {mode}, {n}": (
            model,
            sharded,
            overlap,
            mode,
            n,
        )
        for model, sharded, overlap, mode, n in cases
    }


def gradients(rank, ranks, model, sharded, overlap, mode, microbatches):
    """main_grad is the mean of one process over the batches of all ranks, to the bit; other ranks' shards are left
    out."""
    module = build(model)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=model != "fused" or mode == "sum",
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlap,
        bucket_size=WIDE if overlap else None,
        **MODES[mode],
    )
    wanted = [reference(model, module, ranks, microbatches, step) for step in range(3)]
    per_token = mode == "per token" or ranks == 3  # a third is no whole number
    if mode == "average" and ranks == 3:
        return
    ddp = DistributedDataParallel(config, module, calculate_per_token_loss=per_token)
    assert len(ddp.bucket_groups) == 1 or overlap
    wrong = []  # raised at the end: the other ranks would wait for one that left a step
    for step in range(3):
        ddp.zero_grad_buffer()
        for microbatch in range(microbatches):
            with ddp.no_sync() if microbatch + 1 < microbatches else contextlib.nullcontext():
                backward(model, ddp, batch(model, rank, microbatch, step), module)
        if overlap and step:
            assert all(group.state is not group.state.ACCUMULATING for group in ddp.bucket_groups), "not overlapped"
        ddp.finish_grad_sync()
        for name, p in module.named_parameters():
            start, end, got = own_part(ddp, p)
            want = wanted[step][name].reshape(-1)[start:end] / (1 if per_token else ranks)
            if not torch.equal(got, want.to(got.dtype)) or p.grad is not None:
                wrong.append(f"step {step}: {name}: {got[:4]}, wanted {want[:4]}; grad {p.grad}")
    assert not wrong, "\n".join(wrong)


WIDE = 1100  # elements after which a bucket closes: several buckets, of several parameters


def gathers(rank, ranks, overlap, debug):
    """Weights that each rank writes in its own shard are whole in the next forward, and for every other reader."""
    module = build("plain")
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=overlap,
        bucket_size=WIDE,
        debug=debug,
    )
    ddp = DistributedDataParallel(config, module)
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(3):
        for buffer in ddp.buffers:
            for bucket in buffer.buckets:
                bucket.own_shard(bucket.param_data).mul_(2.0)
        ddp.reset_param_sync_dispatch_state()
        ddp._begin_gathers()
        if step == 0:
            ddp(batch("plain", rank, 0))
        elif step == 1:
            module.state_dict()
        else:
            ensure_params_ready(module.parameters())
            module = copy.deepcopy(module)
        values = {name: 2.0 * value for name, value in values.items()}
        for name, p in module.named_parameters():
            assert torch.equal(p, values[name]), f"step {step}: {name}"
    assert ddp.state_dict().keys() == module.state_dict().keys()
    assert module is not ddp.module


def broadcasts(rank, ranks, sharded):
    module = build("plain")
    with torch.no_grad():
        module.first.weight += rank
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sharded), module)
    ddp.broadcast_params()
    assert torch.equal(module.first.weight, build("plain").first.weight)
    gaps = torch.nn.Linear(4, 4, bias=False)  # rows on a pitch, as those of FP8 weights
    values = torch.arange(32.0, device=here()).view(4, 8) * (1 - rank)
    gaps.weight = torch.nn.Parameter(values[:, :4])
    DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sharded), gaps).broadcast_params()
    assert torch.equal(gaps.weight, torch.arange(32.0, device=here()).view(4, 8)[:, :4])


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left = (torch.nn.Linear(8, 8, bias=False, device=here()) for _ in range(2))

    def forward(self, x, both=False):
        return self.used(x) + (self.left(x) if both else 0)


def unused(rank, ranks):
    """A parameter that only some steps use, and only on one rank, counts with zeros elsewhere."""
    options = {"overlap_grad_reduce": True, "bucket_size": 1}
    ddp = DistributedDataParallel(DistributedDataParallelConfig(find_unused_parameters=True, **options), Branches())
    for step in range(4):
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 8, device=here()), both=step % 2 == 0 and rank == 0).sum().backward()
        ddp.finish_grad_sync()
        assert torch.equal(ddp.module.used.weight.main_grad, torch.ones(8, 8, device=here()))
        left = 1.0 / ranks if step % 2 == 0 else 0.0
        assert torch.equal(ddp.module.left.weight.main_grad, torch.full((8, 8), left, device=here()))
    late = DistributedDataParallel(DistributedDataParallelConfig(find_unused_parameters=True, **options), Branches())
    for _ in range(2):  # the last microbatch of rank 0 uses no parameter, so that it has no backward
        late.zero_grad_buffer()
        with late.no_sync():
            late(torch.ones(1, 8, device=here())).sum().backward()
        if rank:
            late(torch.ones(1, 8, device=here()), both=True).sum().backward()
        late.finish_grad_sync()
        for p, wanted in ((late.module.used.weight, 2 - 1 / ranks), (late.module.left.weight, 1 - 1 / ranks)):
            torch.testing.assert_close(p.main_grad, torch.full((8, 8), wanted, device=here()))
    strict = DistributedDataParallel(DistributedDataParallelConfig(**options), Branches())
    strict.zero_grad_buffer()
    strict(torch.ones(1, 8, device=here()), both=rank != 0).sum().backward()
    text = raised(RuntimeError, strict.finish_grad_sync)  # rank 0 alone lacks one: all say so
    assert "1 of 2 parameters" in text and "'left.weight'" in text


def not_finite(rank, ranks):
    options = {"check_for_nan_in_grad": True, "overlap_grad_reduce": True, "bucket_size": 1}
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**options), Branches())
    for step in range(3):
        ddp.zero_grad_buffer()
        x = torch.ones(1, 8, device=here())
        y = ddp.module.used(x) + ddp.module.left(x * (torch.inf if rank == ranks - 1 and step == 1 else 1.0))
        y.sum().backward()
        if step != 1:
            ddp.finish_grad_sync()
            continue
        text = raised(RuntimeError, ddp.finish_grad_sync)
        assert "'left.weight'" in text and f"rank {ranks - 1}" in text and "bucket 0" in text, text


def differing(rank, ranks):
    if ranks == 1:
        return
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    odd = rank == ranks - 1
    module = torch.nn.Linear(8, 9 if odd else 8, device=here())
    before = module.weight.data_ptr()
    text = raised(ValueError, lambda: DistributedDataParallel(config, module))
    assert "'weight'" in text and f"rank {ranks - 1}" in text and module.weight.data_ptr() == before, text
    frozen = torch.nn.Linear(8, 8, device=here()).requires_grad_(not odd)
    text = raised(ValueError, lambda: DistributedDataParallel(config, frozen))
    assert "no trainable parameter" in text, text


def within_a_step(rank, ranks):
    """A second wrapper while one rank's gradients are being reduced: all ranks raise, and the step goes on."""
    last, x = ranks - 1, torch.ones(1, 8, device=here())
    config, module = DistributedDataParallelConfig(overlap_grad_reduce=True), torch.nn.Linear(8, 8, device=here())
    ddp = DistributedDataParallel(config, module)
    for step in range(2):
        ddp.zero_grad_buffer()
        if not step or rank == last:
            ddp(x).sum().backward()
        if not step:
            ddp.finish_grad_sync()
    text = raised(RuntimeError, lambda: DistributedDataParallel(config, module))
    assert "'module'" in text and f"being reduced on ranks [{last}]" in text and "zero_grad_buffer()" in text, text
    if rank != last:
        ddp(x).sum().backward()
    ddp.finish_grad_sync()
    assert (module.weight.main_grad == 1.0).all()
    DistributedDataParallel(config, module)


def refused_meshes(rank, ranks):
    """A mesh of two dimensions, on all ranks; one of its dimensions is taken."""
    mesh = init_device_mesh(here().type, (1, ranks), mesh_dim_names=("tp", "dp"))
    for name in ("process_group", "expert_process_group"):
        module = Branches()
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        text = raised(ValueError, partial(DistributedDataParallel, config, module, **{name: mesh}))
        assert f"'{name}' is a DeviceMesh of 2 dimensions" in text and "mesh['dp']" in text, text
        assert not hasattr(module.used.weight, "main_grad")
        assert len(DistributedDataParallel(config, module, **{name: mesh["dp"]}).bucket_groups) == 1


def refused_dtensors(rank, ranks):
    """Also a replicated one: it shares memory with another tensor."""
    mesh = init_device_mesh(here().type, (ranks,))
    for placement in (Shard(0), Replicate()):
        module = Branches()
        module.left.weight = torch.nn.Parameter(distribute_tensor(module.left.weight.detach(), mesh, [placement]))
        text = raised(ValueError, partial(DistributedDataParallel, DistributedDataParallelConfig(), module))
        assert "'left.weight' is a DTensor" in text and "whole on this rank" in text, text
        assert not any(hasattr(p, "main_grad") for p in module.parameters())


def experts(rank, ranks):
    """2 x 2: experts are summed over two ranks, and scaled by four as all others are."""
    groups = [dist.new_group([i, i + 2]) for i in range(2)]
    for average, sharded in itertools.product((False, True), (False, True)):
        module = Branches()
        module.left.weight.allreduce = False
        options = {"use_distributed_optimizer": sharded, "average_in_collective": average}
        ddp = DistributedDataParallel(
            DistributedDataParallelConfig(**options), module, expert_process_group=groups[rank % 2]
        )
        assert len(ddp.expert_parallel_buffers) == len(ddp.buffers) == 1
        ddp.zero_grad_buffer()
        ddp(torch.full((1, 8), 1.0 + rank, device=here()), both=True).sum().backward()
        ddp.finish_grad_sync()
        for p, wanted in ((module.used.weight, 10 / 4), (module.left.weight, (4 + 2 * (rank % 2)) / 4)):
            _, _, got = own_part(ddp, p)
            assert (got == wanted).all() and (sharded or got.numel() == 64)


OTHERS = {
    "gathers": lambda rank, ranks: gathers(rank, ranks, overlap=True, debug=False),
    "gathers, debug": lambda rank, ranks: gathers(rank, ranks, overlap=True, debug=True),
    "gathers, serial": lambda rank, ranks: gathers(rank, ranks, overlap=False, debug=False),
    "broadcasts": lambda rank, ranks: broadcasts(rank, ranks, False),
    "broadcasts, sharded": lambda rank, ranks: broadcasts(rank, ranks, True),
    "unused": unused,
    "not finite": not_finite,
    "differing": differing,
    "within a step": within_a_step,
    "refused meshes": refused_meshes,
    "refused DTensors": refused_dtensors,
}


def everything(rank, ranks):
    """{case: its traceback, or ''}."""
    cases = {name: (gradients, case) for name, case in grid(ranks).items()}
    cases |= {name: (case, ()) for name, case in OTHERS.items()}
    if ranks == 4:
        cases["experts"] = experts, ()
    return each(rank, ranks, cases)
