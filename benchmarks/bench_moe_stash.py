"""The paged stash inside the mixture (targets.py case 29): forward and backward of a stack of blocks
x + MoEMLP(norm(x)) (examples/moe), a part of the experts here, buffers for `capacity` times the rows of an even
routing.

ours: with a te.stash.PagedStash. own static: without. te offload: te.get_cpu_offload_context around all blocks but the
last. recompute: te.checkpoint around each block.
Ways: eager; `_graph`: one CUDA graph of forward and backward; `_layers`: te.make_graphed_callables block by block.
`_fp8`: the pre-activation is saved in FP8. `_zipf`: experts whose load falls with their rank.

`kept`: what the groups hold at the peak, in MiB: the peak of a step, the pool included, less what the stack without a
stash needs beside its groups at that peak. `predicted` is the law of docs/guide/stash.md, with the sets of buffers of
that way: one in a stack, two layer by layer. `host`: of two mixtures, so small that the device is never the
bottleneck."""

import dataclasses
import gc
import pathlib
import sys
import warnings

import torch
from common import Bench, Case

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import transformer_engine.pytorch as te
from moe.blocks import Config, MoEStack
from moe.memory import peak_bytes
from transformer_engine.pytorch.stash import PagedStash

FACTOR = 1.2
MIB = 2**20
STEP = "forward+backward"
SETS = {"": 1, "_graph": 1, "_layers": 2}  # of buffers for the worst case at once


class Stack:
    """A stack, its stash or what is around its blocks, and its steps."""

    def __init__(self, bench, config, page_bytes, skew="balanced", around=None, stashed=False):
        torch.manual_seed(0)
        self.device, self.page_bytes = bench.device, page_bytes
        self.stash = PagedStash(page_bytes, factor=FACTOR, device=bench.device) if stashed else None
        self.model = MoEStack(config, bench.device, self.stash, fuse_wgrad_accumulation=True)
        self.model.skew(skew)
        for parameter in self.model.parameters():  # gradients that stay, so that a step's peak has none of its own
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad = torch.zeros_like(parameter)
        self.around = None
        if around == "offload":
            self.around = te.get_cpu_offload_context(True, config.layers - 1, config.layers)
        self.blocks = list(self.model.blocks)
        if around == "recompute":
            self.blocks = [
                lambda x, block=block: te.checkpoint(block, x, use_reentrant=False) for block in self.model.blocks
            ]
        self.x, self.dy = (bench.randn(config.tokens, config.hidden, dtype="bf16") for _ in range(2))
        self.x.requires_grad_()
        self.x.grad = torch.zeros_like(self.x)
        self.eager()
        if self.stash is not None:
            self.stash.reset()  # makes the pool, of the first step's size
        self.captured = None

    def eager(self):
        """Adds to the gradients that stay."""
        if self.stash is not None:
            self.stash.reset()
        y = self.x
        if self.around is not None:
            y = self.model(y, self.around)
        else:
            for block in self.blocks:
                y = block(y)
        y.backward(self.dy)

    def capture(self, way):
        """Later steps replay; the peak of the capture is that of its replays."""
        if way == "_graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.eager()
            self.captured = graph
            return
        if self.stash is not None:
            self.stash.reset()
        samples = tuple((self.x.detach().clone().requires_grad_(),) for _ in self.blocks)
        self.blocks = te.make_graphed_callables(tuple(self.model.blocks), samples)

    def step(self, *_):
        if self.captured is not None:
            return self.captured.replay()
        return self.eager()

    def peak(self, way):
        gc.collect()
        return peak_bytes((lambda: self.capture(way)) if way else self.eager, self.device) + self.pool_bytes()

    def pool_bytes(self):
        return 0 if self.stash is None else self.stash.plan().device_pages * self.page_bytes

    def live_bytes(self):
        return self.stash.verdict(wait=True).report["live_bytes"]

    def close(self):
        """Graphs first: they use the pool."""
        self.captured, self.blocks = None, []
        self.stash.close()


def run(bench, config, page_bytes, way, skew="balanced"):
    """The step's time and what is kept, one way."""
    options = ("_fp8" if config.save_preactivation else "") + ("" if skew == "balanced" else f"_{skew}")
    shape = (config.layers, f"{config.capacity:g}")
    flops = 18 * config.balanced_rows * config.hidden * config.ffn * config.layers
    step = Case("29", f"moe_stash_step{way}{options}", "bf16", shape, STEP, flops=flops)
    kept = Case("29", f"moe_stash_kept{way}{options}", "bf16", shape, "keeps")
    if not bench.selects(step) and not bench.selects(kept):
        return
    kinds = {"ours": {"stashed": True}, "own static": {}}
    if not way and not bench.options.ours:
        kinds |= {"te offload": {"around": "offload"}, "recompute": {"around": "recompute"}}
    whole = dataclasses.replace(config, save_preactivation=None)
    stacks = {
        name: Stack(bench, config if name == "ours" else whole, page_bytes, skew, **kind)
        for name, kind in kinds.items()
    }
    peaks = {name: stack.peak(way) for name, stack in stacks.items()}
    if bench.selects(step):
        bench.compare(step, {name: stack.step for name, stack in stacks.items()}, lambda: (stacks["ours"].x,))
    ours = stacks["ours"]
    if bench.selects(kept):
        ours.step()
        live = ours.live_bytes()
        beside = peaks["own static"] - whole.layers * whole.rows * whole.row_bytes
        found = {name: (peak - beside) / MIB for name, peak in peaks.items()}
        bench.record(
            kept, found | {"predicted": (SETS[way] * config.rows * config.row_bytes + FACTOR * live) / MIB}, "MiB"
        )
    ours.close()


def stack_of(modules, stash):
    """A step of two mixtures; the second, whose backward follows its forward, stays whole."""
    parameters = [parameter for module in modules for parameter in module.parameters()]

    def step(x, dy):
        if stash is not None:
            stash.reset()
        y = x
        for module in modules:
            y = module(y)[0]
        return torch.autograd.grad(y, [x, *parameters], dy)

    return step


def host(bench):
    tokens, hidden, ffn, experts, topk = shape = (64, 128, 128, 8, 2)
    case = Case("29", "moe_stash_host", "bf16", shape, STEP, flops=2 * 18 * tokens * topk * hidden * ffn)
    if not bench.selects(case):
        return
    stash = PagedStash(2048, device=bench.device)
    contenders = {}
    for name, each in (("ours", stash), ("own static", None)):
        how = {"params_dtype": torch.bfloat16, "device": bench.device, "stash": each}
        contenders[name] = stack_of([te.MoEMLP(hidden, ffn, experts, topk, **how) for _ in range(2)], each)
    inputs = [bench.randn(tokens, hidden, dtype="bf16") for _ in range(2)]
    inputs[0].requires_grad_()
    bench.compare_host(case, contenders, lambda: tuple(inputs))
    stash.close()


def main():
    bench = Bench(__doc__)
    warnings.filterwarnings("ignore", message=".*stashing costs memory.*")
    if bench.cuda:
        config = Config(layers=16, tokens=8192, hidden=2048, ffn=768, experts=128, here=32, k=8, capacity=4.0)
        page_bytes, ways = 524288, ("_graph", "_layers", "")
    else:
        config = Config(layers=4, tokens=512, hidden=64, ffn=128, experts=16, here=4, k=2, capacity=4.0)
        page_bytes, ways = 2048, ("",)
    for way in ways:
        run(bench, config, page_bytes, way)
    run(bench, dataclasses.replace(config, save_preactivation="fp8"), page_bytes, ways[0])
    run(bench, config, page_bytes, ways[0], "zipf")
    host(bench)
    bench.finish()


if __name__ == "__main__":
    main()
