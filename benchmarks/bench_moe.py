"""te.MoEMLP and te.moe.GroupedMLP forward and backward (targets.py case 27) beside the same mixture of F.grouped_mm,
index operations and eager or compiled torch; in FP8 beside their own bf16.

Shape: tokens x hidden x ffn_hidden x experts x topk. Flops of the routed rows R = tokens * topk: 6 R hidden ffn_hidden
forward, 18 with the backward; the router and the copies are not counted. `_zipf`: experts whose load falls as 1 / rank.
`_cached`: weights that are quantized once for all calls. `_rows`: beside the same layer with rows that are kept.
`_host`: the host time, for layers so small that the device is never the bottleneck."""

import torch
import torch.nn.functional as F
from common import Bench, Case, keeps_mib, training_step
from fp8 import RECIPES
from plain import swiglu

import transformer_engine.pytorch as te

GPU_SHAPES = ((8192, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2))
CPU_SHAPES = ((256, 128, 96, 8, 2),)
HOST_SHAPES = ((64, 128, 128, 8, 2), (64, 128, 128, 128, 8))
STEP = "forward+backward"


class PlainExperts(torch.nn.Module):
    """Two F.grouped_mm and SwiGLU, with the weights of a GroupedMLP."""

    def __init__(self, experts):
        super().__init__()
        for name in ("fc1", "fc2"):
            setattr(self, name, torch.nn.Parameter(getattr(experts, name).weight.detach().clone()))

    def forward(self, rows, offsets, scale):
        hidden = swiglu(F.grouped_mm(rows, self.fc1.mT, offs=offsets)) * scale[:, None].to(rows.dtype)
        return F.grouped_mm(hidden, self.fc2.mT, offs=offsets)


class PlainMoE(torch.nn.Module):
    """The mixture in torch's operations, without a synchronization."""

    def __init__(self, moe):
        super().__init__()
        self.router = torch.nn.Parameter(moe.router.weight.detach().clone())
        self.experts, self.topk = PlainExperts(moe.experts), moe.topk

    def forward(self, x):
        values, chosen = F.linear(x, self.router).float().topk(self.topk, -1)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        counts = torch.zeros_like(self.router[:, 0], dtype=torch.int64).scatter_add(0, pairs, torch.ones_like(pairs))
        token, scale = order // self.topk, values.softmax(-1).flatten()[order]
        out = self.experts(x.index_select(0, token), counts.cumsum(0).to(torch.int32), scale)
        return torch.zeros_like(x).index_add(0, token, out)


class Called(torch.nn.Module):
    """The output of a MoEMLP, inside autocast if there is a recipe. cached: its quantized weights are kept."""

    def __init__(self, moe, recipe=None, cached=False):
        super().__init__()
        self.moe, self.recipe, self.is_first = moe, recipe, True if cached else None

    def forward(self, x):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y, _ = self.moe(x, self.is_first)
        self.is_first = self.is_first and False  # None stays
        return y


def layer(bench, shape, skewed=False, **options):
    _, hidden, ffn, experts, topk = shape
    moe = te.MoEMLP(hidden, ffn, experts, topk, params_dtype=torch.bfloat16, device=bench.device, **options)
    if skewed:
        with torch.no_grad():
            ranks = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
            moe.router.weight[:, 0] = -torch.log1p(ranks.float())
    return moe


def inputs(bench, shape):
    """x, whose first feature is 1, and dy."""
    x = bench.randn(shape[0], shape[1], dtype="bf16")
    x[:, 0] = 1
    return x.requires_grad_(), bench.randn(shape[0], shape[1], dtype="bf16")


def flops(shape, direction):
    tokens, hidden, ffn, _, topk = shape
    return (6 if direction == "forward" else 18) * tokens * topk * hidden * ffn


def run(bench, shape):
    moe = layer(bench, shape)
    ours = Called(moe)

    def peers(step):
        found = {"torch eager": step(PlainMoE(moe))}
        return found | {name: step(peer) for name, peer in bench.compiled(lambda: PlainMoE(moe)).items()}

    def case(op, direction, dtype="bf16"):
        count = 0 if direction == "keeps" else flops(shape, direction)
        return Case("27", op, dtype, shape, direction, flops=count)

    for direction, step in (("forward", lambda module: lambda x, dy: module(x)), (STEP, training_step)):
        if bench.selects(one := case("moe_mlp", direction)):
            bench.compare(one, {"ours": step(ours), **peers(step)}, lambda: inputs(bench, shape))
    if bench.selects(one := case("moe_mlp", "keeps")):
        rows = Called(layer(bench, shape, keep_rows=True))
        modules = {"ours": ours, "own kept rows": rows, "torch eager": PlainMoE(moe)}
        bench.record(one, {name: keeps_mib(module, inputs(bench, shape)[0]) for name, module in modules.items()}, "MiB")
    if bench.selects(one := case("moe_mlp_rows", STEP)):
        rows = Called(layer(bench, shape, keep_rows=True))
        bench.compare(
            one, {"ours": training_step(ours), "own kept rows": training_step(rows)}, lambda: inputs(bench, shape)
        )
    if bench.selects(one := case("moe_mlp_zipf", STEP)):
        skewed = training_step(Called(layer(bench, shape, skewed=True)))
        bench.compare(one, {"ours": skewed, "own even": training_step(ours)}, lambda: inputs(bench, shape))
    for name, recipe in RECIPES.items():
        for suffix in ("", "_cached"):
            if bench.selects(one := case(f"moe_mlp_{name}{suffix}", STEP, "fp8")):
                fp8 = training_step(Called(layer(bench, shape), recipe, bool(suffix)))
                bench.compare(one, {"ours": fp8, "own bf16": training_step(ours)}, lambda: inputs(bench, shape))
    run_experts(bench, shape, moe.experts, case)


def run_experts(bench, shape, experts, case):
    """The experts alone, with even groups on the device."""
    tokens, hidden, _, count, topk = shape
    rows = tokens * topk
    splits = torch.full((count,), rows // count, device=bench.device)  # the counts divide these rows
    offsets = splits.cumsum(0).to(torch.int32)

    def sets():
        x, dy = (bench.randn(rows, hidden, dtype="bf16") for _ in range(2))
        return x.requires_grad_(), torch.rand(rows, device=bench.device).requires_grad_(), dy

    def step(module, groups):
        parameters = list(module.parameters())

        def forward_backward(x, scale, dy):
            x.grad = scale.grad = None
            for parameter in parameters:
                parameter.grad = None
            module(x, groups, scale).backward(dy)

        return forward_backward

    if bench.selects(one := case("grouped_mlp", STEP)):
        contenders = {"ours": step(experts, splits), "torch eager": step(PlainExperts(experts), offsets)}
        compiled = bench.compiled(lambda: PlainExperts(experts))
        bench.compare(one, contenders | {name: step(peer, offsets) for name, peer in compiled.items()}, sets)


def run_host(bench, shape):
    case = Case("27", "moe_mlp_host", "bf16", shape, STEP, flops=flops(shape, STEP))
    if bench.selects(case):
        moe = layer(bench, shape)
        contenders = {"ours": training_step(Called(moe)), "torch eager": training_step(PlainMoE(moe))}
        bench.compare_host(case, contenders, lambda: inputs(bench, shape))


def main():
    bench = Bench(__doc__)
    for shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, shape)
    for shape in HOST_SHAPES:
        run_host(bench, shape)
    bench.finish()


if __name__ == "__main__":
    main()
