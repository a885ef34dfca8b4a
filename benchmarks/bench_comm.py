"""The local work of tensor parallelism besides its products: the sum of the ranks' partials, and gathered columnwise
FP8 data in the layout of the whole.

Bytes of comm_ordered_sum: (t + 1) b an element of out for t ranks and dtypes of b bytes (read, write); the bias is not
counted. The peers: torch's sum over the first dimension, which adds in another order and rounds twice with a
bias. Bytes of comm_interleave: 2 a byte of data; the peer: torch.cat along the columns."""

import torch
from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import _C

# ranks, rows, cols: the rows of one rank of 8192 tokens
GPU_SHAPES = (("bf16", (2, 4096, 8192)), ("bf16", (8, 1024, 8192)), ("fp32", (2, 4096, 8192)))
CPU_SHAPES = (("bf16", (2, 256, 1024)), ("fp32", (8, 64, 1024)))


def ordered_sum(bench, dtype, shape):
    ranks, rows, cols = shape
    width = TORCH_DTYPES[dtype].itemsize
    case = Case("T", "comm_ordered_sum", dtype, shape, "forward", bytes=(ranks + 1) * rows * cols * width)
    if not bench.selects(case):
        return

    def plain(partials, bias):
        return partials.sum(0).add_(bias)

    peers = {"torch eager": plain} | ({"torch compile": bench.compile(plain)} if bench.cuda else {})
    bench.compare(
        case,
        {"ours": _C.comm_ordered_sum} | peers,
        lambda: (bench.randn(*shape, dtype=dtype), bench.randn(cols, dtype=dtype)),
    )


def interleave(bench, shape):
    case = Case("T", "comm_interleave", "fp8", shape, "forward", bytes=2 * shape[0] * shape[1] * shape[2])
    if not bench.selects(case):
        return
    bench.compare(
        case,
        {"ours": _C.comm_interleave, "torch cat": lambda shards: torch.cat(shards.unbind(0), 1)},
        lambda: (torch.randint(256, shape, dtype=torch.uint8, device=bench.device),),
    )


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        ordered_sum(bench, dtype, shape)
    for ranks, rows, cols in ((2, 8192, 4096), (8, 8192, 1024)) if bench.cuda else ((2, 1024, 512),):
        interleave(bench, (ranks, rows, cols))
    bench.finish()


if __name__ == "__main__":
    main()
