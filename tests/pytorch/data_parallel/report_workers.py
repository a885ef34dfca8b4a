# Workers of test_report.py: bytes of a wrapped model beside its storages, and times of collectives.
import time

import torch
import torch.distributed as dist
from ranks import here
from torch.multiprocessing.reductions import StorageWeakRef

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.flat_shard import FlatShard
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer

WIDTH = 256
# name -> (sharded, held in FP8, FusedAdam's options, bytes a parameter by the number of ranks)
LAWS = {
    "unsharded": (False, False, {}, lambda ranks: 18),
    "sharded": (True, False, {}, lambda ranks: 6 + 12 / ranks),
    "remainders": (True, False, {"store_param_remainders": True}, lambda ranks: 6 + 10 / ranks),
    "bf16 moments": (
        True, False, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}, lambda ranks: 6 + 8 / ranks
    ),
    "FP8 moments": (
        True, False, {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, lambda ranks: 6 + 6 / ranks
    ),
    "FP8 weights": (True, True, {}, lambda ranks: 6 + 12 / ranks),
    "FP8 weights off 16 bytes": (True, True, {}, lambda ranks: 5 + 2 * PITCHED + 12 / ranks),
}  # fmt: skip
OFF = 248  # the width of the last one: its rows are on a pitch of 256, beside the dense ones
PITCHED = (256 / OFF) ** 2


def wrapped(sharded, fp8, adam, width=WIDTH, **config):
    """(wrapper, optimizer, whether the first memory of each weight is still there)."""
    options = {"params_dtype": torch.bfloat16, "device": here(), "bias": False}
    with te.quantized_model_init(fp8, DelayedScaling(), preserve_high_precision_init_val=True):
        module = torch.nn.Sequential(*(te.Linear(width, width, **options) for _ in range(3)))
    first = [] if fp8 else [StorageWeakRef(p.untyped_storage()) for p in module.parameters()]
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, bucket_size=width * width, **config
    )
    ddp = DistributedDataParallel(config, module)
    fused = te.optimizers.FusedAdam(module.parameters(), master_weights=True, **adam)
    return ddp, DistributedOptimizer(fused, ddp), [not ref.expired() for ref in first]


def step(ddp, optimizer, fp8=False):
    optimizer.zero_grad()
    x = torch.ones(4, ddp.module[0].in_features, dtype=torch.bfloat16, device=here())
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        y = ddp(x)
    y.float().square().mean().backward()
    return optimizer.step()


def memory(rank):
    """{name: (bytes a parameter of the plan by status, of the storages, of the law, whether originals are there)}"""
    found = {}
    for name, (sharded, fp8, adam, law) in LAWS.items():
        width = OFF if "off 16" in name else WIDTH
        ddp, optimizer, alive = wrapped(sharded, fp8, adam, width)
        step(ddp, optimizer, fp8)
        count = sum(p.numel() for p in ddp.module.parameters())
        x = torch.ones(4, width, dtype=torch.bfloat16, device=here())
        plan = te.memory_plan(ddp, x, optimizer=optimizer)
        rows = {status: plan.bytes_of(status) / count for status in ("parameter", "gradient", "optimizer")}
        tensors = [p.main_grad for p in ddp.module.parameters()]
        for p in ddp.module.parameters():
            tensors += [t for t in p.get_data_tensors() if t is not None] if fp8 else [p.detach()]
        tensors += [buffer.param_data for buffer in ddp.buffers if sharded]
        steps = optimizer._steps
        for shard in (s for own in optimizer._shards for s in own):
            tensors += [*steps.keeper.state[shard.weight].values(), *([shard.weight] if fp8 else [])]
        for state in (*optimizer.state.values(), *optimizer.optimizer.state.values()):
            tensors += [getattr(t, "local", t) for t in state.values() if isinstance(t, torch.Tensor | FlatShard)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[name] = rows, sum(storages.values()) / count, law(dist.get_world_size()), any(alive)
    return found


def times(rank):
    """The rows of a timeline: before it was asked for, of a plain step, and of one in which rank 1 is late."""
    ddp, optimizer, _ = wrapped(True, False, {}, overlap_grad_reduce=True, overlap_param_gather=True)
    made, store = [], dist.distributed_c10d._get_default_store()
    step(ddp, optimizer)
    first = ddp.timeline()
    for late in (0.0, 1.0):
        step(ddp, optimizer)
        optimizer.zero_grad()
        loss = ddp(torch.ones(4, WIDTH, dtype=torch.bfloat16, device=here())).float().square().mean()
        if rank == 1:
            store.wait([f"rank 0 waits, {late}"])
            time.sleep(late)
        loss.backward()
        if rank == 0:
            store.set(f"rank 0 waits, {late}", "")
        ddp.finish_grad_sync()
        made.append([tuple(row) for row in ddp.timeline()])
        shown = str(ddp.timeline())
        ddp.zero_grad_buffer()
    return list(first), *made, shown, len(ddp._groups)
