"""Captured callables (targets.py case 23): the host's time of a replayed layer, its replay against the sum of its
kernels, the memory of a pipeline's order with and without shared buffers, and the overlap of a tail after an event.

CUDA only. Peers: torch.cuda.make_graphed_callables around an equal module, and that module in eager; FP8 rows are
compared with torch's bf16 graph. Shape of the pipeline: stages x microbatches x tokens x hidden; of the tail: tokens x
hidden, copied to pinned memory."""

import copy

import numpy as np
import timing
import torch
from common import Bench, Case, training_step
from plain import Mlp

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

TOKENS, HIDDEN, FFN_HIDDEN = 128, 1024, 4096
FLOPS = 18 * TOKENS * HIDDEN * FFN_HIDDEN
STEP = "forward+backward"
OPTIONS = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": torch.bfloat16}

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}

STAGES, MICROBATCHES = 4, 8
PIPELINE = (1024, 2048, 8192)  # tokens, hidden, ffn_hidden of each stage's layer
TAIL = (4096, 4096)


def order(stages, microbatches):
    """An interleaved schedule with `stages` chunks on one rank, two microbatches of each in flight."""
    ahead = list(range(1, stages + 1))
    steps = [chunk for chunk in ahead for _ in range(2)]
    for _ in range(microbatches // 2 - 1):
        for back, forth in zip(reversed(ahead), ahead):
            steps += [-back, forth] * 2
    return steps + [-chunk for chunk in reversed(ahead) for _ in range(2)]


def host_time(bench):
    case = Case("23", "graphed_layernorm_mlp", "bf16", (TOKENS, HIDDEN, FFN_HIDDEN), STEP, flops=FLOPS)
    if not bench.selects(case):
        return None
    eager = te.LayerNormMLP(HIDDEN, FFN_HIDDEN, device=bench.device, **OPTIONS)
    ours, torchs, aliased = (copy.deepcopy(eager) for _ in range(3))
    plain = Mlp(HIDDEN, FFN_HIDDEN, dtype=torch.bfloat16, device=bench.device)

    def sets():
        return bench.randn(TOKENS, HIDDEN, dtype="bf16", grad=True), bench.randn(TOKENS, HIDDEN, dtype="bf16")

    te.make_graphed_callables(ours, sets()[:1])
    te.make_graphed_callables(aliased, sets()[:1], clone_param_grads_on_return=False)
    torch.cuda.make_graphed_callables(torchs, sets()[:1])
    bench.compare_host(
        case,
        {
            "ours": training_step(ours),
            "torch graph": training_step(torchs),
            "own eager": training_step(eager),
            "torch eager": training_step(plain),
            "own static gradients": training_step(aliased),
        },
        sets,
    )
    return ours.forward


def fp8_host_time(bench):
    """As above under each recipe, including the autocast around each call."""
    shape = (TOKENS, HIDDEN, FFN_HIDDEN)
    cases = {name: Case("23", f"graphed_layernorm_mlp_{name}", "fp8", shape, STEP, flops=FLOPS) for name in RECIPES}
    eager = te.LayerNormMLP(HIDDEN, FFN_HIDDEN, device=bench.device, **OPTIONS)

    def sets():
        return bench.randn(TOKENS, HIDDEN, dtype="bf16", grad=True), bench.randn(TOKENS, HIDDEN, dtype="bf16")

    def under(module, chosen):
        def call(x):
            with te.autocast(enabled=True, recipe=chosen):
                return module(x)

        return training_step(call, module.parameters())

    for name, case in cases.items():
        if not bench.selects(case):
            continue
        ours, torchs = copy.deepcopy(eager), copy.deepcopy(eager)
        te.make_graphed_callables(ours, sets()[:1], enabled=True, recipe=RECIPES[name])
        torch.cuda.make_graphed_callables(torchs, sets()[:1])
        contenders = {
            "ours": under(ours, RECIPES[name]),
            "torch graph": training_step(torchs),
            "own eager": under(copy.deepcopy(eager), RECIPES[name]),
        }
        bench.compare_host(case, contenders, sets)
        ours.reset()


def replay_time(bench, graphed):
    """Replay time of forward and backward, against the sum of their nodes' times in the profiler."""
    node = Case("23", "graphed_layernorm_mlp_node", "bf16", (TOKENS, HIDDEN, FFN_HIDDEN), STEP, flops=FLOPS)
    total = Case("23", "graphed_layernorm_mlp_replay", "bf16", (TOKENS, HIDDEN, FFN_HIDDEN), STEP, flops=FLOPS)

    def replays(count):
        for _ in range(count):
            graphed.record.forward_graph.replay()
            graphed.record.backward_graph.replay()

    replays(10)
    count = 20
    times = [timing._device_us(lambda: replays(count), 1000.0) / count for _ in range(timing.CUDA_ROUNDS)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replays(count)
        torch.cuda.synchronize()
    nodes = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not nodes:
        print("replay_time: the profiler saw no kernel; no rows")
        return
    busy, each = sum(e.device_time for e in nodes) / count, len(nodes) / count
    replay = float(np.median(times))
    print(f"{each:.1f} nodes, {busy:.2f} us of kernels, replay {replay:.2f} us")
    bench.record(total, {"ours": replay, "sum of kernels": busy}, "us")
    bench.record(node, {"ours": max(replay - busy, 1e-3) / each}, "us")


def pipeline_memory(bench):
    tokens, hidden, ffn_hidden = PIPELINE
    case = Case("23", "graphed_pipeline", "bf16", (STAGES, MICROBATCHES, tokens, hidden), "keeps")
    if not bench.selects(case):
        return

    def extra(**options):
        layers = tuple(te.LayerNormMLP(hidden, ffn_hidden, device=bench.device, **OPTIONS) for _ in range(STAGES))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        samples = tuple((bench.randn(tokens, hidden, dtype="bf16", grad=True),) for _ in range(STAGES * MICROBATCHES))
        graphed = te.make_graphed_callables(layers, samples, _order=order(STAGES, MICROBATCHES), **options)
        del samples
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used = (torch.cuda.memory_reserved() - before) / 2**20
        for one in graphed:
            one.reset()
        return used

    extra()  # allocations of libraries for the capture's stream are not counted
    bench.record(case, {"ours": extra(_reuse_graph_input_output_buffers=True), "own unshared": extra()}, "MiB")


class WithTail(torch.nn.Module):
    """A product whose result is copied to the host after the event."""

    def __init__(self, tokens, hidden, device):
        super().__init__()
        self.linear = te.Linear(hidden, hidden, bias=False, params_dtype=torch.bfloat16, device=device)
        self.event = torch.cuda.Event(external=True)
        self.host = torch.empty(tokens, hidden, dtype=torch.bfloat16, pin_memory=True)

    def forward(self, x):
        y = self.linear(x)
        self.event.record()
        self.host.copy_(y, non_blocking=True)
        return y


def tail(bench):
    """A captured region with a tail, then products on the main stream that last about as long as the tail."""
    tokens, hidden = TAIL
    case = Case("23", "graphed_tail", "bf16", TAIL, "forward", bytes=2 * tokens * hidden)
    if not bench.selects(case):
        return
    module = WithTail(tokens, hidden, bench.device)
    with torch.no_grad():
        te.make_graphed_callables(module, (bench.randn(tokens, hidden, dtype="bf16"),))
    stream, weight = torch.cuda.Stream(), bench.randn(hidden, hidden, dtype="bf16")
    copy_us = 2 * tokens * hidden / 55e3  # of pinned memory, at 55 GB/s
    products = max(1, round(copy_us / (2 * tokens * hidden * hidden / 700e6)))  # at 700 TFLOP/s

    def compute(y):
        for _ in range(products):
            y = y @ weight
        return y

    contenders = {
        "ours": lambda x: compute(module(x, cuda_graph_stream=stream, cuda_graph_event=module.event)),
        "own without event": lambda x: compute(module(x, cuda_graph_stream=stream)),
        "without the tail": lambda x: compute(module.linear(x)),
    }
    found = bench.compare(case, contenders, lambda: (bench.randn(tokens, hidden, dtype="bf16"),))
    if found.keys() != contenders.keys():  # requested only for ours
        return
    hidden_share = (found["own without event"] - found["ours"]) / (
        found["own without event"] - found["without the tail"]
    )
    print(f"of the tail, {100 * hidden_share:.0f} % is hidden behind the main stream's work")


def main():
    bench = Bench(__doc__)
    if not bench.cuda:
        print("bench_graph: graphs are on CUDA; nothing to measure here")
        return
    graphed = host_time(bench)
    if graphed is not None:
        replay_time(bench, graphed)
    fp8_host_time(bench)
    pipeline_memory(bench)
    tail(bench)
    bench.finish()


if __name__ == "__main__":
    main()
