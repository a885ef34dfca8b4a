"""Steps of data parallelism over the ranks that torchrun has started (case D), beside torch's DistributedDataParallel,
FSDP2 and megatron-core's own, with their memory.

    torchrun --nproc-per-node=2 bench_data_parallel.py                    # NCCL, each rank on its own CUDA device
    torchrun --nproc-per-node=2 bench_data_parallel.py --device cpu       # gloo, a small model
    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node=2 bench_data_parallel.py --only _connections     # and 8

A step is zero_grad, forward, backward and the optimizer's step, of a stack of RMSNorm + MLP layers of this library with
weights of one dtype. `ours` shards and overlaps, as FSDP2 does, with gradients, master weights and moments in fp32 in
both; `own serial` does not overlap; `own silent` is `ours` with collectives that do nothing. data_parallel_whole does
not shard, with gradients and moments in the weights' dtype, as torch's DDP; data_parallel_average is `ours` with an
average in the collective, as megatron-core's; data_parallel_block has weights in FP8 blocks. Waits are those of
ddp.timeline(), beside the largest reduction and the gathers of the first layer alone, which nothing hides; by group,
the gathers' alone, of a step whose gathers start group by group. Collectives are those of all buckets at once, beside
torch.distributed's. Memory is the peak of a contender by itself, beside the law's bytes: 6 + 12 / ranks a parameter;
data_parallel_memory_lean keeps remainders of master weights, and moments in bf16: 6 + 6 / ranks. data_parallel_growth
is the peak of a step after hundreds, beside that of the first. The third line's environment variable, read at a
process's start, names its steps and waits. bench_data_parallel_host.py has the host's costs. On a CPU wanted:
data_parallel_whole <= 1.05 x `torch ddp`."""

import contextlib
import gc
import os
import pathlib
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from common import TORCH_DTYPES, Case
from rank_bench import RankBench
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.data_parallel.communicator import Done

DTYPE = {"cuda": "bf16", "cpu": "fp32"}
STACKS = {"cuda": (4, 4096, 14336, 4096), "cpu": (4, 256, 704, 256)}  # layers, hidden, FFN, tokens of a rank
HOST = {"cuda": (32, 256, 256, 16), "cpu": (8, 64, 64, 16)}
CALLS = {"cuda": 5, "cpu": 10}
ADAM = {"lr": 1e-4, "weight_decay": 0.01}
GROWTH = {"cuda": 500, "cpu": 50}  # steps
CONNECTIONS = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")


class Run:
    """One contender: a model, what wraps it, and its optimizer."""

    def __init__(self, x, wrapped, optimizer, recipe=None):
        self.x, self.wrapped, self.optimizer, self.recipe = x, wrapped, optimizer, recipe

    def __call__(self):
        self.optimizer.zero_grad()
        with te.autocast(recipe=self.recipe) if self.recipe else contextlib.nullcontext():
            y = self.wrapped(self.x)
        y.square().mean().backward()
        self.optimizer.step()


class MegatronRun(Run):
    def __call__(self):
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.wrapped(self.x).square().mean().backward()
        self.wrapped.finish_grad_sync()
        self.optimizer.step()


def model(bench, shape, dtype=None, fused=True, recipe=None):
    """fused: products add weight gradients to main_grad, which torch's wrappers have not. recipe: of FP8 weights."""
    layers, hidden, ffn, _ = shape
    options = {"bias": False, "normalization": "RMSNorm", "activation": "swiglu", "fuse_wgrad_accumulation": fused}
    options |= {"params_dtype": dtype or TORCH_DTYPES[DTYPE[bench.device.type]], "device": bench.device}
    torch.manual_seed(0)
    with te.quantized_model_init(recipe is not None, recipe, preserve_high_precision_init_val=True):
        return torch.nn.Sequential(*(te.LayerNormMLP(hidden, ffn, **options) for _ in range(layers)))


def wrap(module, **config):
    config = te.distributed.DistributedDataParallelConfig(**config)
    return te.distributed.DistributedDataParallel(config, module)


def ours(bench, shape, x, overlap=True, by_group=False, recipe=None, config=None, **adam):
    module = model(bench, shape, recipe=recipe)
    ddp = wrap(
        module,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        **(config or {}),
    )
    masters = bench.cuda or recipe is not None
    adam = te.optimizers.FusedAdam(module.parameters(), **ADAM, master_weights=masters, **adam)
    options = {"overlap_param_gather_with_optimizer_step": by_group}
    return Run(x, ddp, te.optimizers.DistributedOptimizer(adam, ddp, **options), recipe)


def own_lean(bench, shape, x):
    return ours(
        bench, shape, x, store_param_remainders=True, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16
    )


def own_whole(bench, shape, x):
    module = model(bench, shape)
    ddp = wrap(module, grad_reduce_in_fp32=False, overlap_grad_reduce=True)
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


def megatron(bench, shape, x):
    """megatron-core's wrapper and optimizer over these modules; on a CPU with the tests' stand-ins for CUDA, which the
    rest of the process keeps."""
    if not bench.cuda:
        sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests/pytorch/clients"))
        import megatron_on_cpu

        megatron_on_cpu.pretend()
        megatron_on_cpu.collectives_one_by_one()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    layers, hidden, ffn, _ = shape
    dtypes = {"bf16": x.dtype is torch.bfloat16, "params_dtype": x.dtype}
    both = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, average_in_collective=True, **both
    )
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": 4}
    ddp = DistributedDataParallel(TransformerConfig(**sizes, **dtypes), config, model(bench, shape))
    adam = OptimizerConfig(optimizer="adam", clip_grad=0.0, **ADAM, **dtypes, **both)
    return MegatronRun(x, ddp, get_megatron_optimizer(adam, [ddp]))


def inputs(bench, shape):
    return bench.randn(shape[-1], 1, shape[1], dtype=DTYPE[bench.device.type])


STEP = {"ours": ours, "own serial": partial(ours, overlap=False), "own silent": own_silent, "fsdp2": fsdp2}
WHOLE = {"ours": own_whole, "torch ddp": torch_ddp}
EVERY = STEP | {"own whole": own_whole, "torch ddp": torch_ddp}
BLOCK = {"ours": partial(ours, recipe=Float8BlockScaling()), "own bf16": ours}
AVERAGE = {"ours": partial(ours, config={"average_in_collective": True}), "megatron": megatron}


def flops(shape):
    layers, hidden, ffn, tokens = shape
    return 6 * layers * 3 * hidden * ffn * tokens


def case_of(bench, name, shape, dtype=None, connections=False, **count):
    """connections: the row's name has the value of the environment variable."""
    name += f"_connections{CONNECTIONS}" if connections and CONNECTIONS else ""
    count = count or {"flops": flops(shape)}
    return Case("D", f"data_parallel_{name}", dtype or DTYPE[bench.device.type], shape, "step", **count)


def compare(bench, case, contenders, host=False):
    """Device time of steps; host: the time until they are queued. Contenders have the same first weights."""
    if not bench.selects(case):
        return
    x = inputs(bench, case.shape)
    runs = {name: make(bench, case.shape, x) for name, make in contenders.items()}
    p50 = bench.compare_ranks(case, runs, CALLS[bench.device.type], host=host)
    for peer in list(contenders)[1:]:
        bench.say(f"  ours / {peer}: {p50['ours'] / p50[peer]:.3f}")
    del runs
    gc.collect()


def collectives(bench, shape):
    """Reductions and gathers of all buckets: all start, then all are waited for."""
    sizes = {"reduce": 4, "reduce_reproducible": 4, "gather": TORCH_DTYPES[DTYPE[bench.device.type]].itemsize}
    layers, hidden, ffn, _ = shape
    for name, size in sizes.items():
        case = case_of(bench, name, shape, bytes=size * layers * 3 * hidden * ffn)
        if not bench.selects(case):
            continue
        run = ours(bench, shape, inputs(bench, shape), config={"reproducible": name == "reduce_reproducible"})
        groups = run.wrapped.bucket_groups
        buckets = [bucket for group in groups for bucket in group.buckets]

        def reduce(run=run, groups=groups):
            for group in groups:
                group.reset()
                group.start_grad_sync()
            for group in groups:
                group.wait_for_reduction()
            run.wrapped.free_overlap_buffers()

        def gather(groups=groups):
            for group in groups:
                group.start_param_sync()
            for group in groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

        def raw_reduce(buckets=buckets):
            data = [bucket.grad_data for bucket in buckets]
            shards = [bucket.own_shard(bucket.grad_data) for bucket in buckets]
            for work in [dist.reduce_scatter_tensor(*each, async_op=True) for each in zip(shards, data)]:
                work.wait()

        def raw_gather(buckets=buckets):
            data = [bucket.param_data for bucket in buckets]
            shards = [bucket.own_shard(bucket.param_data) for bucket in buckets]
            for work in [dist.all_gather_into_tensor(*each, async_op=True) for each in zip(data, shards)]:
                work.wait()

        own, raw = (gather, raw_gather) if name == "gather" else (reduce, raw_reduce)
        bench.compare_ranks(case, {"ours": own, "raw": raw}, CALLS[bench.device.type])


def waits(bench, shape, by_group):
    """How long a step's collectives were waited for, beside a reduction and gathers of the first layer alone; by group:
    how long the gathers were."""
    case = case_of(bench, "waits_by_group" if by_group else "waits", shape, connections=True)
    if not bench.selects(case):
        return
    run = ours(bench, shape, inputs(bench, shape), by_group=by_group)
    run()
    run.wrapped.timeline()
    samples = {"ours": []} if by_group else {"ours": [], "own reductions": [], "own gathers": []}
    for _ in range(bench.rounds):
        bench.together()
        run()
        run.wrapped(run.x)  # a forward waits for the gathers
        rows = run.wrapped.timeline()
        exposed = {kind: 1e3 * sum(r.exposed for r in rows if r.kind == kind) + 1e-3 for kind in ("reduce", "gather")}
        samples["ours"].append(exposed["gather"] + (0 if by_group else exposed["reduce"]))
        if not by_group:
            samples["own reductions"].append(exposed["reduce"])
            samples["own gathers"].append(exposed["gather"])
    bench.say(rows)
    if not by_group:
        samples["alone"] = alone(bench, run.wrapped)
    bench._write(case, bench.largest(samples), "us")


def alone(bench, ddp):
    """The largest reduction of the first layer, whose gradients come last, and the gathers of its weights."""
    first = {id(group): group for group in map(ddp.param_to_bucket_group.get, ddp.module[0].parameters())}.values()
    reduced = max((group.buckets for group in first), key=lambda buckets: sum(b.numel_unpadded for b in buckets))
    gathered = [bucket for group in first for bucket in group.buckets]

    def both():
        for bucket in reduced:
            dist.reduce_scatter_tensor(bucket.own_shard(bucket.grad_data), bucket.grad_data)
        for bucket in gathered:
            dist.all_gather_into_tensor(bucket.param_data, bucket.own_shard(bucket.param_data))

    return [bench.timed(both, 1) for _ in range(bench.rounds)]


def memory(bench, shape):
    """The peak of each contender alone on its device, and the law's bytes."""
    case = case_of(bench, "memory", shape)
    if not bench.selects(case) or not bench.cuda:
        return
    gc.collect()  # of what earlier cases left
    time.sleep(1)  # NCCL's thread lets go of the tensors of its last collectives
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
        time.sleep(1)
        left = torch.cuda.memory_allocated() - before
        bench.say(f"  {name}: {left} bytes are left after it")
    layers, hidden, ffn, _ = shape
    weights = layers * 3 * hidden * ffn / 2**20
    lean = {"ours": peaks.pop("own lean"), "fsdp2": peaks["fsdp2"], "law": weights * (6 + 6 / bench.ranks)}
    bench.record(case, peaks | {"law": weights * (6 + 12 / bench.ranks)}, "MiB")
    bench.record(case_of(bench, "memory_lean", shape), lean, "MiB")


def growth(bench, shape):
    """The peak of a step after many, beside that of an early one."""
    case = case_of(bench, "growth", shape)
    if not bench.selects(case):
        return
    run = ours(bench, shape, inputs(bench, shape))

    def peak():
        bench.together()
        bench.reset_memory()
        run()
        bench.together()
        return bench.memory() / 2**20

    for _ in range(10):
        run()
    first = peak()
    for _ in range(GROWTH[bench.device.type]):
        run()
    bench.record(case, {"ours": peak(), "own first": first}, "MiB")


def main():
    bench = RankBench(__doc__)
    stack, host = STACKS[bench.device.type], HOST[bench.device.type]
    compare(bench, case_of(bench, "step", stack, connections=True), STEP)
    waits(bench, stack, by_group=False)
    waits(bench, stack, by_group=True)
    if not CONNECTIONS:
        memory(bench, stack)
        growth(bench, host)
        compare(bench, case_of(bench, "host", host), EVERY, host=True)
        compare(bench, case_of(bench, "whole", stack), WHOLE)
        compare(bench, case_of(bench, "block", stack, "fp8"), BLOCK)
        collectives(bench, stack)
        compare(bench, case_of(bench, "average", stack), AVERAGE)
    bench.finish()


if __name__ == "__main__":
    main()
