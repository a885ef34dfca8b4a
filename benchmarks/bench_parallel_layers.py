"""LayerNormMLP and TransformerLayer of an 8B model divided over the ranks that torchrun has started, with
sequence_parallel (targets.py case M): forward and backward, over peers in chunks ("chunked": ours), as "auto" decides
(own auto), over the group (own off), and beside plain torch, which computes while its collectives run (async_op). `own
undivided` is the module of this rank's heads and hidden units over all tokens: no rank communicates.

    torchrun --nproc-per-node=2 bench_parallel_layers.py                    # NCCL, each rank on its own CUDA device
    torchrun --nproc-per-node=2 bench_parallel_layers.py --device cpu       # gloo, small shapes: checks that it runs
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Case
from fp8 import Quantized
from rank_bench import RankBench

import transformer_engine.pytorch as te

STEP = "forward+backward"


@dataclasses.dataclass
class Sizes:
    """Of all ranks."""

    positions: int
    batch: int
    hidden: int
    ffn: int
    heads: int
    groups: int

    @property
    def shape(self):
        return self.positions * self.batch, self.ffn, self.hidden


SIZES = {"cuda": Sizes(4096, 2, 4096, 14336, 32, 8), "cpu": Sizes(32, 2, 32, 64, 4, 2)}
RECIPES = {"cuda": ("current", "delayed", "block"), "cpu": ("current",)}


def gathered(x):
    """All ranks' rows, and the work that ends when they are there."""
    whole = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True)


def scattered(x):
    part = x.new_empty((x.shape[0] // dist.get_world_size(), *x.shape[1:]))
    return part, dist.reduce_scatter_tensor(part, x.contiguous(), async_op=True)


def weight_gradient(dy, x):
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


class Column(torch.autograd.Function):
    """Gathers again in its backward, beside the input's gradient, which it scatters beside the weight's."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        whole, work = gathered(x)
        work.wait()
        return F.linear(whole, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        whole, arrives = gathered(x)
        dx, leaves = scattered(dy @ weight)
        arrives.wait()
        dw = weight_gradient(dy, whole)
        leaves.wait()
        return dx, dw


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        y, work = scattered(F.linear(x, weight))
        work.wait()
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        whole, work = gathered(dy)
        work.wait()
        return whole @ weight, weight_gradient(whole, x)


class Mlp(torch.nn.Module):
    """Plain torch's, divided."""

    def __init__(self, sizes, options):
        super().__init__()
        mine = sizes.ffn // dist.get_world_size()
        self.norm = torch.nn.RMSNorm(sizes.hidden, **options)
        self.fc1 = torch.nn.Parameter(torch.randn(2 * mine, sizes.hidden, **options) / 64)
        self.fc2 = torch.nn.Parameter(torch.randn(sizes.hidden, mine, **options) / 64)

    def forward(self, x):
        gate, up = Column.apply(self.norm(x), self.fc1).chunk(2, -1)
        return Row.apply(F.silu(gate) * up, self.fc2)


class Layer(torch.nn.Module):
    """The same, with attention."""

    def __init__(self, sizes, options):
        super().__init__()
        ranks = dist.get_world_size()
        self.heads, self.groups, self.width = sizes.heads // ranks, sizes.groups // ranks, sizes.hidden // sizes.heads
        rows = (self.heads + 2 * self.groups) * self.width
        self.norm = torch.nn.RMSNorm(sizes.hidden, **options)
        self.qkv = torch.nn.Parameter(torch.randn(rows, sizes.hidden, **options) / 64)
        self.proj = torch.nn.Parameter(torch.randn(sizes.hidden, self.heads * self.width, **options) / 64)
        self.mlp = Mlp(sizes, options)

    def forward(self, x):
        parts = Column.apply(self.norm(x), self.qkv).unflatten(-1, (-1, self.width)).permute(1, 2, 0, 3)
        q, k, v = parts.split((self.heads, self.groups, self.groups), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + Row.apply(y.permute(2, 0, 1, 3).flatten(2), self.proj)
        return x + self.mlp(x)


def modules(kind, sizes, options):
    """{way: module} of one kind; the undivided one has this rank's sizes."""
    ranks = dist.get_world_size()
    shared = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": torch.bfloat16}
    shared["device"] = options["device"]

    def made(part, **divided):
        if kind == "mlp":
            return te.LayerNormMLP(sizes.hidden, sizes.ffn // part, **shared, **divided)
        heads, groups = sizes.heads // part, sizes.groups // part
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "kv_channels": sizes.hidden // sizes.heads}
        return te.TransformerLayer(
            sizes.hidden, sizes.ffn // part, heads, num_gqa_groups=groups, fuse_qkv_params=True, **dropout, **shared,
            **divided,
        )  # fmt: skip

    divided = {"set_parallel_mode": True, "sequence_parallel": True, "tp_group": dist.group.WORLD}
    ways = {
        way: made(1, tp_overlap=overlap, **divided)
        for way, overlap in (("ours", "chunked"), ("own auto", "auto"), ("own off", "off"))
    }
    ways["own undivided"] = made(ranks)
    return ways


def measure(bench, kind, dtype):
    """dtype: bf16, or a recipe of FP8."""
    sizes = SIZES[bench.device.type]
    tokens, ffn, hidden = sizes.shape
    products = 3 * ffn * hidden
    if kind == "layer":
        products += 2 * hidden * hidden * (1 + sizes.groups / sizes.heads)
    op, plain = f"parallel_{kind}", dtype == "bf16"
    flops = int(6 * tokens * products) // bench.ranks
    case = Case("M", op if plain else f"{op}_{dtype}", "bf16" if plain else "fp8", sizes.shape, STEP, flops=flops)
    if not bench.selects(case):
        return
    options = {"device": bench.device, "dtype": torch.bfloat16}
    ways = modules(kind, sizes, options)
    if plain:
        ways["torch async"] = {"mlp": Mlp, "layer": Layer}[kind](sizes, options)
    else:
        ways = {way: Quantized(module, dtype) for way, module in ways.items()}

    def step(way):
        module = ways[way]
        positions = sizes.positions // (1 if way == "own undivided" else bench.ranks)
        x = bench.randn(positions, sizes.batch, hidden, dtype="bf16", grad=True)
        dy = bench.randn(positions, sizes.batch, hidden, dtype="bf16")
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def run():
            x.grad = None
            module(x).backward(dy)

        return run

    bench.compare_ranks(case, {way: step(way) for way in ways}, calls=3 if bench.cuda else 1)


def main():
    bench = RankBench(__doc__)
    for kind in ("mlp", "layer"):
        for dtype in ("bf16", *RECIPES[bench.device.type]):
            measure(bench, kind, dtype)
    bench.finish()


if __name__ == "__main__":
    main()
