"""The FP8 products of a linear layer at the shapes of targets.py case 12, without quantization: per-tensor scales,
fast and split accumulation, and blocks (weight 128 x 128, x and dy 1 x 128), against torch._scaled_mm (per-tensor) and
our bf16 product. Prints their rates at the end.

Flops: 2 M N K each. Shapes are the layer's M x N x K, whichever product is timed."""

import torch
from common import Bench, Case

from transformer_engine.pytorch import _C

GPU = ((8192, 28672, 4096), (8192, 4096, 14336), (8192, 6144, 4096), (8192, 4096, 4096))
CPU = ((128, 704, 256),)
TENSOR, BLOCK_1D, BLOCK_2D = 0, 1, 2
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def blocks(n):
    return -(-n // 128)


class Operand:
    """FP8 data [outer, depth] of N(0, 1) scaled into the format, its scales, and both again as bf16."""

    def __init__(self, bench, outer, depth, scaling, dtype):
        values = 80 * torch.randn(outer, depth, device=bench.device)
        shape = ((2,), (blocks(depth), -(-outer // 4) * 4), (blocks(outer), -(-blocks(depth) // 4) * 4))[scaling]
        self.fp8, self.bf16 = values.to(dtype), values.bfloat16()
        self.scale_inv = torch.full(shape, 1 / 80, device=bench.device)
        self.code = 2 * scaling + (dtype == E5M2)

    @property
    def nbytes(self):
        return self.fp8.nbytes

    @property
    def arguments(self):
        return self.fp8.view(torch.uint8), self.scale_inv, self.code


def ours(a, b, fast=False):
    return torch.ops.te.gemm_fp8(*a.arguments, *b.arguments, torch.bfloat16, None, fast)


def scaled_mm(a, b, fast=False):
    scales = {"scale_a": b.scale_inv[:1].view(()), "scale_b": a.scale_inv[:1].view(())}
    return torch._scaled_mm(b.fp8, a.fp8.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


def run(bench, m, n, k, rates):
    # direction, (outer of a, outer of b, depth), scalings in blocks, format of b per-tensor
    products = {
        "fprop": ("forward", (n, m, k), (BLOCK_2D, BLOCK_1D), E4M3),
        "dgrad": ("backward", (k, m, n), (BLOCK_2D, BLOCK_1D), E5M2),
        "wgrad": ("backward", (k, n, m), (BLOCK_1D, BLOCK_1D), E5M2),
    }

    def product(a, b):
        return _C.gemm(a.bf16, b.bf16, "TN", "none", None, None, None)

    def compare(op, direction, extents, scalings, dtype, contenders, own=product):
        case = Case("12", op, "fp8", (m, n, k), direction, flops=2 * m * n * k)
        if not bench.selects(case):
            return
        (a_outer, b_outer, depth), (a_scaling, b_scaling) = extents, scalings

        def make():
            return Operand(bench, a_outer, depth, a_scaling, E4M3), Operand(bench, b_outer, depth, b_scaling, dtype)

        times = bench.compare(case, contenders | {"own bf16": own}, make)
        rates[(op, (m, n, k))] = {name: 2e-6 * m * n * k / us for name, us in times.items()}

    for name, (direction, extents, scalings, dtype) in products.items():
        for suffix, fast in (("_fast", True), ("", False)) if name == "fprop" else (("", False),):
            contenders = {"ours": lambda a, b, fast=fast: ours(a, b, fast)}
            if bench.cuda:
                contenders["torch eager"] = lambda a, b, fast=fast: scaled_mm(a, b, fast)
            compare(f"gemm_fp8_{name}{suffix}", direction, extents, (TENSOR, TENSOR), dtype, contenders)
        compare(f"gemm_fp8_block_{name}", direction, extents, scalings, E4M3, {"ours": ours})
    out = torch.zeros(n, k, dtype=torch.float32, device=bench.device)

    def accumulate(a, b):
        return torch.ops.te.gemm_fp8_accumulate(*a.arguments, *b.arguments, out, False, False)

    def accumulate_bf16(a, b):
        return _C.gemm_accumulate(a.bf16, b.bf16, "TN", out, False, False)

    direction, extents, scalings, dtype = products["wgrad"]
    one = {"ours": accumulate}
    compare("gemm_fp8_wgrad_accumulate", direction, extents, (TENSOR, TENSOR), dtype, one, accumulate_bf16)
    compare("gemm_fp8_block_wgrad_accumulate", direction, extents, scalings, E4M3, one, accumulate_bf16)


def main():
    bench = Bench(__doc__)
    rates = {}
    for shape in GPU if bench.cuda else CPU:
        run(bench, *shape, rates)
    print("\nTFLOP/s")
    for (op, shape), by_name in rates.items():
        print(f"{op:34}{'x'.join(map(str, shape)):>18}  ", "  ".join(f"{k} {v:.0f}" for k, v in by_name.items()))
    bench.finish()


if __name__ == "__main__":
    main()
