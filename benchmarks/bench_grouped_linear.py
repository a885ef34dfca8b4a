"""te.GroupedLinear forward and backward (targets.py case 18): host and device splits, in bf16 beside torch's grouped_mm
with the same rows, in FP8 beside its own bf16; `_cached`: with weights that are quantized once. Flops: 6 R N K over all
groups. Routings: even, Zipf's.
`_host`: the host's time of a forward and backward, for groups so small that the device is never the bottleneck;
`_changing_host`: with another list in each call, as from a router."""

import itertools

import torch
import torch.nn.functional as F
from common import TORCH_DTYPES, Bench, Case, training_step
from fp8 import Quantized, pairs

import transformer_engine.pytorch as te

# experts, rows, N, K
GPU_SHAPES = ((8, 16384, 28672, 4096), (128, 65536, 1536, 2048))
CPU_SHAPES = ((4, 512, 256, 192),)
HOST_ROWS, HOST_WIDTH = 8, 128  # of a group


def routing(kind, experts, rows):
    """Rows of each expert: equal, or falling as 1 / rank, the largest not the first."""
    weights = torch.ones(experts) if kind == "even" else 1 / (1.0 + torch.arange(experts))
    counts = (weights / weights.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts[torch.randperm(experts, generator=torch.Generator().manual_seed(0))].tolist()


class Called(torch.nn.Module):
    """A GroupedLinear with its splits."""

    def __init__(self, experts, splits):
        super().__init__()
        self.experts, self.splits = experts, splits

    def forward(self, x, **told):
        return self.experts(x, self.splits, **told)


class Changing(Called):
    """Uses one list after the other."""

    def __init__(self, experts, lists):
        super().__init__(experts, None)
        self.lists = itertools.cycle(lists)

    def forward(self, x):
        self.splits = next(self.lists)
        return super().forward(x)


def lists_of(experts, rows, count=64):
    """Lists of sizes with a fixed sum, as random routing makes them."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, experts, (count, rows), generator=generator)
    return [torch.bincount(one, minlength=experts).tolist() for one in drawn]


class TorchGrouped(torch.nn.Module):
    def __init__(self, experts, splits, device):
        super().__init__()
        weights = [getattr(experts, f"weight{i}").detach() for i in range(experts.num_gemms)]
        self.weight = torch.nn.Parameter(torch.stack(weights))
        self.offsets = torch.tensor(splits, device=device).cumsum(0).to(torch.int32)

    def forward(self, x):
        return F.grouped_mm(x, self.weight.mT, offs=self.offsets)


def run(bench, shape, kind):
    experts, rows, n, k = shape
    dtype = "bf16"

    def sets():
        return bench.randn(rows, k, dtype=dtype, grad=True), bench.randn(rows, n, dtype=dtype)

    def case(op, kind_of_dtype):
        name = op if kind == "even" else f"{op}_{kind}"
        return Case("18", name, kind_of_dtype, shape, "forward+backward", flops=6 * rows * n * k)

    splits = routing(kind, experts, rows)
    options = {"bias": False, "params_dtype": TORCH_DTYPES[dtype]}
    module = te.GroupedLinear(experts, k, n, device=bench.device, **options)
    if bench.selects(case("grouped_linear", dtype)):
        peer = {"torch eager": training_step(TorchGrouped(module, splits, bench.device))}
        bench.compare(case("grouped_linear", dtype), {"ours": training_step(Called(module, splits)), **peer}, sets)
    if bench.selects(case("grouped_linear_device", dtype)):
        there = Called(module, torch.tensor(splits, device=bench.device))
        peer = {"torch eager": training_step(TorchGrouped(module, splits, bench.device))}
        bench.compare(case("grouped_linear_device", dtype), {"ours": training_step(there), **peer}, sets)
    if bench.selects(case("grouped_linear_device_main_grad", dtype)):
        adding = te.GroupedLinear(experts, k, n, device=bench.device, fuse_wgrad_accumulation=True, **options)
        for p in adding.parameters():
            p.main_grad = torch.zeros(p.shape, device=bench.device)
        there = Called(adding, torch.tensor(splits, device=bench.device))
        peer = {"torch eager": training_step(TorchGrouped(module, splits, bench.device))}
        bench.compare(case("grouped_linear_device_main_grad", dtype), {"ours": training_step(there), **peer}, sets)
        del adding, there
    there = torch.tensor(splits, device=bench.device)
    for name, suffix, cached in pairs():
        for where, rows_of in (("", splits), ("_device", there)):
            one = case(f"grouped_linear{where}_{name}{suffix}", "fp8")
            if bench.selects(one):
                plain = Called(module, rows_of)
                ours = training_step(Quantized(plain, name, cached))
                bench.compare(one, {"ours": ours, "own bf16": training_step(plain)}, sets)


def run_host(bench, experts):
    shape = (experts, experts * HOST_ROWS, HOST_WIDTH, HOST_WIDTH)
    splits = [HOST_ROWS] * experts
    there = torch.tensor(splits, device=bench.device)
    changing = lists_of(experts, shape[1])
    for op, where, fused in (
        ("", splits, False),
        ("_changing", changing, False),
        ("_device", there, False),
        ("_device_main_grad", there, True),
    ):
        case = Case(
            "18", f"grouped_linear{op}_host", "bf16", shape, "forward+backward", flops=6 * shape[1] * HOST_WIDTH**2
        )
        if not bench.selects(case):
            continue
        options = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fused}
        module = te.GroupedLinear(experts, HOST_WIDTH, HOST_WIDTH, device=bench.device, **options)
        for p in module.parameters() if fused else ():
            p.main_grad = torch.zeros(p.shape, device=bench.device)
        size = shape[1], HOST_WIDTH
        bench.compare_host(
            case,
            {"ours": training_step((Changing if op == "_changing" else Called)(module, where))},
            lambda size=size: (bench.randn(*size, dtype="bf16", grad=True), bench.randn(*size, dtype="bf16")),
        )


def main():
    bench = Bench(__doc__)
    for shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        for kind in ("even", "zipf"):
            run(bench, shape, kind)
        run_host(bench, shape[0])
    bench.finish()


if __name__ == "__main__":
    main()
