"""The host's time of data parallelism (case D), over the ranks that torchrun has started: parts of a step, each beside
the same without it.

    torchrun --nproc-per-node=2 bench_data_parallel_host.py                 # NCCL
    torchrun --nproc-per-node=2 bench_data_parallel_host.py --device cpu    # gloo

data_parallel_host_graphs is the host's time of a step of 32 small layers that do not shard, each captured by
make_graphed_callables after the wrapping, beside the same without graphs. data_parallel_gate is a gate beyond its
addition: a backward that brings nothing to some thousand parameters, less the same without a wrapper;
data_parallel_pre_hook a hook before a forward, per module: forwards of modules that do nothing, less those after
disable_forward_pre_hook(). data_parallel_group is all that the wrapper does in a step for a bucket group of 16
parameters: zero_grad_buffer(), gates, reduction, gather, and the waits for them; data_parallel_fp8_weight what a step
adds for a weight in FP8 blocks: cast, amaxes, bytes' columns. Layouts of ten thousand parameters are planned without
memory. Wanted: graphs <= 0.5 x `own eager`, a gate 0.5 us, a hook 1.2 us, a group 60 us and 1 us a parameter, an FP8
weight 5 us, a layout 0.2 s."""

import time

import torch
from bench_data_parallel import ADAM, HOST, Run, case_of, compare, inputs, model, ours, wrap
from rank_bench import RankBench

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.data_parallel.layout import ParamSpec, buffer_layouts

PARAMETERS, GATES, HOOKS = 10_000, 2000, 1000
GROUPS = (32, 16, 4096)  # groups, parameters of each, elements of a parameter
FP8 = (16, 256, 256, 256)  # layers, hidden, FFN, tokens: three weights of 256 x 256 a layer


def eager(bench, shape, x):
    module = model(bench, shape)
    ddp = wrap(module, grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    adam = te.optimizers.FusedAdam(module.parameters(), **ADAM, master_weights=bench.cuda)
    return Run(x, ddp, te.optimizers.DistributedOptimizer(adam, ddp))


def graphed(bench, shape, x):
    """Each layer is captured with the result of the one before it, which it then reads without a copy; gradients of
    parameters are not copied either, as they go into main_grad at once."""
    run = eager(bench, shape, x)
    sample = x.detach().clone()
    for layer in run.wrapped.module:
        te.make_graphed_callables(layer, (sample,), clone_param_grads_on_return=False)
        sample = layer(sample).detach().requires_grad_()
    return run


class Nothing(torch.autograd.Function):
    """Brings no gradient to its parameters, as a node that adds to main_grad itself."""

    @staticmethod
    def forward(ctx, *parameters):
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return (None,) * ctx.count


class Holder(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, device=device))

    def forward(self, x):
        return x


def seconds(call, *arguments):
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def write_differences(bench, case, pairs, count):
    """pairs: (with, without) in seconds. The least of ten of each, in microseconds of one of `count`."""
    least = [tuple(map(min, zip(*pairs[i : i + 10]))) for i in range(0, len(pairs), 10)]
    bench._write(case, {"ours": [max(1e6 * (own - without) / count, 1e-3) for own, without in least]}, "us")


def gates(bench):
    case = case_of(bench, "gate", (GATES,), "fp32", flops=GATES)
    if not bench.selects(case):
        return
    plain, wrapped = (torch.nn.ParameterList(torch.zeros(8, device=bench.device) for _ in range(GATES)) for _ in "ab")
    ddp = wrap(wrapped, overlap_grad_reduce=True)
    pairs = []
    for _ in range(100):
        ddp.zero_grad_buffer()
        losses = Nothing.apply(*wrapped), Nothing.apply(*plain)
        pairs.append(tuple(seconds(loss.backward) for loss in losses))
        ddp.finish_grad_sync()
    write_differences(bench, case, pairs, GATES)


def hooks(bench):
    case = case_of(bench, "pre_hook", (HOOKS,), "fp32", flops=HOOKS)
    if not bench.selects(case):
        return
    module = torch.nn.ModuleList(Holder(bench.device) for _ in range(HOOKS))
    both = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = wrap(module, bucket_size=8 * 50, **both)

    def forwards():
        for part in module:
            part(None)

    pairs = []
    for _ in range(100):
        own = seconds(forwards)
        ddp.disable_forward_pre_hook(param_sync=False)
        pairs.append((own, seconds(forwards)))
        ddp.enable_forward_pre_hook()
    write_differences(bench, case, pairs, HOOKS)


def groups(bench):
    count, each, elements = GROUPS
    case = case_of(bench, "group", GROUPS, "fp32", flops=count)
    if not bench.selects(case):
        return
    plain, wrapped = (
        torch.nn.ParameterList(torch.zeros(elements, device=bench.device) for _ in range(count * each)) for _ in "ab"
    )
    both = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = wrap(wrapped, bucket_size=each * elements, **both)
    assert len(ddp.bucket_groups) == count

    def step(loss):
        ddp.zero_grad_buffer()
        loss.backward()
        ddp.finish_grad_sync()
        ddp.reset_param_sync_dispatch_state()
        ddp.start_param_sync()
        for group in ddp.bucket_groups:
            group.finish_param_sync()

    pairs = []
    for _ in range(100):
        losses = Nothing.apply(*wrapped), Nothing.apply(*plain)
        bench.together()
        pairs.append((seconds(step, losses[0]), seconds(losses[1].backward)))
    write_differences(bench, case, pairs, count)


def fp8_weights(bench):
    layers = FP8[0]
    case = case_of(bench, "fp8_weight", FP8, "fp8", flops=3 * layers)
    if not bench.selects(case):
        return
    run = ours(bench, FP8, inputs(bench, FP8), overlap=False, recipe=Float8BlockScaling())
    run()
    groups, steps = run.wrapped.bucket_groups, run.optimizer._steps

    def cast():
        for group in groups:
            steps.cast_fp8(group)
            group.note_step()
            group.start_param_sync()

    def gather():
        for group in groups:
            for bucket in group.buckets:
                group.comm.all_gather(bucket.param_data, bucket.own_shard(bucket.param_data)).wait()

    pairs = []
    for _ in range(100):
        bench.together()
        own = seconds(cast)
        bench.together()
        pairs.append((own, seconds(gather)))
    write_differences(bench, case, pairs, sum(len(group.fp8_weights) for group in groups))


def layouts(bench):
    """The host's time to plan ten thousand parameters: no tensor is made."""
    case = case_of(bench, "layout", (PARAMETERS,), "fp32", flops=PARAMETERS)
    if not bench.selects(case):
        return
    specs = [ParamSpec(f"p{i}", 40960, torch.bfloat16, torch.float32) for i in range(PARAMETERS)]
    options = {"sharded": True, "ranks": bench.ranks, "expert_ranks": bench.ranks}
    samples = [1e6 * seconds(lambda: buffer_layouts(specs, **options)) for _ in range(bench.rounds)]
    bench._write(case, bench.largest({"ours": samples}), "us")


def main():
    bench = RankBench(__doc__)
    for part in (layouts, gates, hooks, groups, fp8_weights):
        part(bench)
    if bench.cuda:  # graphs of a CPU are calls again
        case = case_of(bench, "host_graphs", HOST["cuda"])
        compare(bench, case, {"ours": graphed, "own eager": eager}, host=True)
    bench.finish()


if __name__ == "__main__":
    main()
