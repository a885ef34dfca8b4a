"""Steps of data parallelism over the ranks that torchrun has started (case D), beside torch's DistributedDataParallel
and FSDP2, with their memory.

    torchrun --nproc-per-node=2 bench_data_parallel.py                    # NCCL, each rank on its own CUDA device
    torchrun --nproc-per-node=2 bench_data_parallel.py --device cpu       # gloo, a small model

A step is zero_grad, forward, backward and the optimizer's step, of a stack of RMSNorm + MLP layers of this library with
weights of one dtype. `ours` shards and overlaps, as FSDP2 does, with gradients, master weights and moments in fp32 in
both; `own serial` does not overlap; `own silent` is `ours` with collectives that do nothing; `own whole` does not
shard, with gradients and moments in the weights' dtype, as torch's DDP. Waits are those of ddp.timeline(), beside the
last reduction and the first gather alone. Memory is the peak of a contender by itself, beside the law's bytes: 6 + 12 /
ranks a parameter; `own lean` keeps remainders of master weights, and moments in bf16: 6 + 6 / ranks. Layouts of ten
thousand parameters are planned without memory.
On a CPU wanted: `own whole` <= 1.05 x `torch ddp`, a layout <= 0.2 s."""

import gc
import time

import torch
import torch.distributed as dist
from common import TORCH_DTYPES, Case
from rank_bench import RankBench
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel.communicator import Done
from transformer_engine.pytorch.data_parallel.layout import ParamSpec, buffer_layouts

DTYPE = {"cuda": "bf16", "cpu": "fp32"}
STACKS = {"cuda": (4, 4096, 14336, 4096), "cpu": (4, 256, 704, 256)}  # layers, hidden, FFN, tokens of a rank
HOST = {"cuda": (32, 256, 256, 16), "cpu": (8, 64, 64, 16)}
CALLS = {"cuda": 5, "cpu": 10}
ADAM = {"lr": 1e-4, "weight_decay": 0.01}
PARAMETERS = 10_000


class Run:
    """One contender: a model, what wraps it, and its optimizer."""

    def __init__(self, x, wrapped, optimizer):
        self.x, self.wrapped, self.optimizer = x, wrapped, optimizer

    def __call__(self):
        self.optimizer.zero_grad()
        self.wrapped(self.x).square().mean().backward()
        self.optimizer.step()


def model(bench, shape, dtype=None, fused=True):
    """fused: products add weight gradients to main_grad, which torch's wrappers have not."""
    layers, hidden, ffn, _ = shape
    options = {"bias": False, "normalization": "RMSNorm", "activation": "swiglu", "fuse_wgrad_accumulation": fused}
    options |= {"params_dtype": dtype or TORCH_DTYPES[DTYPE[bench.device.type]], "device": bench.device}
    torch.manual_seed(0)
    return torch.nn.Sequential(*(te.LayerNormMLP(hidden, ffn, **options) for _ in range(layers)))


def ours(bench, shape, x, overlap=True, **adam):
    module = model(bench, shape)
    config = te.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    ddp = te.distributed.DistributedDataParallel(config, module)
    adam = te.optimizers.FusedAdam(module.parameters(), **ADAM, master_weights=bench.cuda, **adam)
    return Run(x, ddp, te.optimizers.DistributedOptimizer(adam, ddp))


def own_lean(bench, shape, x):
    return ours(
        bench, shape, x, store_param_remainders=True, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16
    )


def own_whole(bench, shape, x):
    module = model(bench, shape)
    config = te.distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=True)
    ddp = te.distributed.DistributedDataParallel(config, module)
    adam = te.optimizers.FusedAdam(module.parameters(), **ADAM, exp_avg_dtype=x.dtype, exp_avg_sq_dtype=x.dtype)
    return Run(x, ddp, te.optimizers.DistributedOptimizer(adam, ddp))


def own_silent(bench, shape, x):
    run = ours(bench, shape, x)
    run.wrapped._comm._started = lambda tensor, start: Done(tensor.device)
    return run


def torch_ddp(bench, shape, x):
    module = model(bench, shape, fused=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return Run(x, wrapped, torch.optim.AdamW(module.parameters(), **ADAM, fused=True))


def fsdp2(bench, shape, x):
    module = model(bench, shape, torch.float32, fused=False)
    policy = MixedPrecisionPolicy(param_dtype=x.dtype, reduce_dtype=torch.float32)
    for layer in (*module, module):
        fully_shard(layer, reshard_after_forward=False, mp_policy=policy)
    return Run(x, module, torch.optim.AdamW(module.parameters(), **ADAM, fused=True))


def inputs(bench, shape):
    return bench.randn(shape[-1], 1, shape[1], dtype=DTYPE[bench.device.type])


def contenders(bench, shape):
    """Each with the same first weights."""
    x = inputs(bench, shape)
    return {
        "ours": ours(bench, shape, x),
        "own serial": ours(bench, shape, x, overlap=False),
        "own whole": own_whole(bench, shape, x),
        "own silent": own_silent(bench, shape, x),
        "torch ddp": torch_ddp(bench, shape, x),
        "fsdp2": fsdp2(bench, shape, x),
    }


def flops(shape):
    layers, hidden, ffn, tokens = shape
    return 6 * layers * 3 * hidden * ffn * tokens


def steps(bench, shape, host):
    """Device time of steps; host: the time until they are queued."""
    op = "data_parallel_host" if host else "data_parallel_step"
    case = Case("D", op, DTYPE[bench.device.type], shape, "step", flops=flops(shape))
    if not bench.selects(case):
        return
    p50 = bench.compare_ranks(case, contenders(bench, shape), CALLS[bench.device.type], host=host)
    for own, peer in (("ours", "own silent"), ("ours", "own serial"), ("ours", "fsdp2"), ("own whole", "torch ddp")):
        bench.say(f"  {own} / {peer}: {p50[own] / p50[peer]:.3f}")


def waits(bench, shape):
    """How long a step's collectives were waited for, beside the last reduction and the first gather alone."""
    case = Case("D", "data_parallel_waits", DTYPE[bench.device.type], shape, "step", flops=flops(shape))
    if not bench.selects(case):
        return
    run = ours(bench, shape, inputs(bench, shape))
    run()
    run.wrapped.timeline()
    samples = {"ours": []}
    for _ in range(bench.rounds):
        bench.together()
        run()
        run.wrapped(run.x)  # a forward waits for the gathers
        rows = run.wrapped.timeline()
        samples["ours"].append(1e3 * sum(row.exposed for row in rows) + 1e-3)
    bench.say(rows)
    groups = run.wrapped.bucket_groups
    reduced = groups[next(row.group for row in reversed(rows) if row.kind == "reduce")].buckets
    gathered = groups[next(row.group for row in rows if row.kind == "gather")].buckets

    def alone():
        for bucket in reduced:
            dist.reduce_scatter_tensor(bucket.own_shard(bucket.grad_data), bucket.grad_data)
        for bucket in gathered:
            dist.all_gather_into_tensor(bucket.param_data, bucket.own_shard(bucket.param_data))

    samples["alone"] = [bench.timed(alone, 1) for _ in range(bench.rounds)]
    bench._write(case, bench.largest(samples), "us")


def memory(bench, shape):
    """The peak of each contender alone on its device, and the law's bytes."""
    case = Case("D", "data_parallel_memory", DTYPE[bench.device.type], shape, "step", flops=flops(shape))
    if not bench.selects(case) or not bench.cuda:
        return
    x, peaks = inputs(bench, shape), {}
    before = torch.cuda.memory_allocated()
    for name, make in {"fsdp2": fsdp2, "ours": ours, "own lean": own_lean}.items():
        run = make(bench, shape, x)
        run()
        bench.together()
        bench.reset_memory()
        run()
        bench.together()
        peaks[name] = (bench.memory() - before) / 2**20
        del run
        gc.collect()
        time.sleep(1)  # NCCL's thread lets go of the tensors of its last collectives
        left = torch.cuda.memory_allocated() - before
        bench.say(f"  {name}: {left} bytes are left after it")
    layers, hidden, ffn, _ = shape
    weights = layers * 3 * hidden * ffn / 2**20
    peaks |= {"law": weights * (6 + 12 / bench.ranks), "law lean": weights * (6 + 6 / bench.ranks)}
    bench.record(case, peaks, "MiB")


def layouts(bench):
    """The host's time to plan ten thousand parameters: no tensor is made."""
    case = Case("D", "data_parallel_layout", "fp32", (PARAMETERS,), "step", flops=PARAMETERS)
    if not bench.selects(case):
        return
    specs = [ParamSpec(f"p{i}", 40960, torch.bfloat16, torch.float32) for i in range(PARAMETERS)]
    samples = []
    for _ in range(bench.rounds):
        begin = time.perf_counter()
        buffer_layouts(specs, sharded=True, ranks=bench.ranks, expert_ranks=bench.ranks)
        samples.append(1e6 * (time.perf_counter() - begin))
    bench._write(case, bench.largest({"ours": samples}), "us")


def main():
    bench = RankBench(__doc__)
    kind = bench.device.type
    layouts(bench)
    memory(bench, STACKS[kind])
    steps(bench, HOST[kind], host=True)
    steps(bench, STACKS[kind], host=False)
    waits(bench, STACKS[kind])
    bench.finish()


if __name__ == "__main__":
    main()
