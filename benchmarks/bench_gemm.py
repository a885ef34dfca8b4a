"""The three products of a linear layer against torch.mm at the Linear shapes (the parts of targets.py case 11), and the
weight gradient accumulated into fp32 by the GEMM against torch.mm and an add.

Flops: 2 M N K each. Shapes are the layer's M x N x K, whichever product is timed."""

import torch
from common import Bench, Case

from transformer_engine.pytorch import _C

GPU = ("bf16", ((8192, 28672, 4096), (8192, 4096, 14336), (8192, 6144, 4096), (8192, 4096, 4096)))
CPU = ("fp32", ((512, 2816, 512), (512, 512, 1408)))
# op: direction, which operands (x [M, K], w [N, K], dy [M, N]) the product reads, its layout, the peer
PRODUCTS = {
    "gemm_fprop": ("forward", "wx", "TN", lambda w, x: torch.mm(x, w.t())),
    "gemm_dgrad": ("backward", "wy", "NN", lambda w, dy: torch.mm(dy, w)),
    "gemm_wgrad": ("backward", "xy", "NT", lambda x, dy: torch.mm(dy.t(), x)),
}


def run(bench, dtype, shape):
    m, n, k = shape
    extents = {"x": (m, k), "w": (n, k), "y": (m, n)}

    def sets(operands):
        return lambda: tuple(bench.randn(*extents[name], dtype=dtype) for name in operands)

    for op, (direction, operands, layout, peer) in PRODUCTS.items():
        case = Case("11", op, dtype, shape, direction, flops=2 * m * n * k)
        if bench.selects(case):

            def ours(a, b, layout=layout):
                return _C.gemm(a, b, layout, "none", None, None, None)

            bench.compare(case, {"ours": ours, "torch eager": peer}, sets(operands))

    case = Case("11", "gemm_wgrad_accumulate", dtype, shape, "backward", flops=2 * m * n * k)
    if bench.selects(case):
        out = torch.zeros(n, k, dtype=torch.float32, device=bench.device)
        contenders = {
            "ours": lambda x, dy: _C.gemm_accumulate(x, dy, "NT", out, False, False),
            "torch eager": lambda x, dy: out.add_(torch.mm(dy.t(), x)),
        }
        bench.compare(case, contenders, sets("xy"))


def main():
    bench = Bench(__doc__)
    dtype, shapes = GPU if bench.cuda else CPU
    for shape in shapes:
        run(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
