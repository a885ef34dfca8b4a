"""What tensor parallelism computes on one rank beside its products: the sum of the ranks' partials.

Bytes of comm_ordered_sum: (t + 1) b an element of out for t ranks and dtypes of b bytes (read, write); the bias is not
counted. The peers: torch's sum over the first dimension, which adds in an order of its own and rounds twice with a
bias."""

from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import _C

# ranks, rows, cols: the rows of one rank of 8192 tokens
GPU_SHAPES = (("bf16", (2, 4096, 8192)), ("bf16", (8, 1024, 8192)), ("fp32", (2, 4096, 8192)))
CPU_SHAPES = (("bf16", (2, 256, 1024)), ("fp32", (8, 64, 1024)))


def ordered_sum(bench, dtype, shape):
    ranks, rows, cols = shape
    width = TORCH_DTYPES[dtype].itemsize
    case = Case("T", "comm_ordered_sum", dtype, shape, "forward", bytes=(ranks + 1) * rows * cols * width)
    if not bench.wants(case):
        return

    def plain(partials, bias):
        return partials.sum(0).add_(bias)

    peers = {"torch eager": plain} | ({"torch compile": bench.compile(plain)} if bench.cuda else {})
    bench.compare(
        case,
        {"ours": _C.comm_ordered_sum} | peers,
        lambda: (bench.randn(*shape, dtype=dtype), bench.randn(cols, dtype=dtype)),
    )


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        ordered_sum(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
