"""Quantization to FP8 against plain PyTorch, eager and compiled (targets.py case 9).

Bytes per element of a bf16 input: 1x128 blocks rowwise 2 + 1 + 4/128, both ways twice the last two more, per tensor by
a given scale with the transpose 2 + 1 + 1. `_current` makes the scale from the tensor's own amax: 2 bytes more.
`master_range_*`: amax and cast of a quarter of a weight's fp32 master, as one of four ranks has it: 4 + 4 + 1. The
peer is a tensor of that size, cast to bf16 and quantized whole."""

import torch
from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import quantize_range_amax, quantize_range_cast

BLOCK, FP8_MAX = 128, 448.0
GPU_SHAPES = (("bf16", (16384, 7168)),)
CPU_SHAPES = (("fp32", (2048, 2816)), ("bf16", (2048, 2816)))


def to_fp8(x, scale):
    return (x.float() * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def scale_of(amax):
    scale = torch.where(amax == 0, 1.0, FP8_MAX / amax)
    return torch.exp2(torch.floor(torch.log2(scale)))


def block_rows(x):
    """Data [rows, cols], scale_inv [cols / 128, rows]."""
    blocks = x.view(x.shape[0], -1, BLOCK)
    scale = scale_of(blocks.abs().amax(-1).float())
    return to_fp8(blocks, scale[..., None]).view(x.shape), scale.reciprocal().t().contiguous()


def block_columns(x):
    """Data [cols, rows], scale_inv [rows / 128, cols]."""
    blocks = x.view(-1, BLOCK, x.shape[1])
    scale = scale_of(blocks.abs().amax(1).float())
    return to_fp8(blocks, scale[:, None]).view(x.shape).t().contiguous(), scale.reciprocal()


def block_both(x):
    return *block_rows(x), *block_columns(x)


def cast_transpose(x, scale):
    data = to_fp8(x, scale)
    return data, data.t().contiguous()


def cast_transpose_current(x):
    return cast_transpose(x, FP8_MAX / x.abs().amax().float())


def run(bench, dtype, shape):
    rows, cols = shape
    n, element = rows * cols, TORCH_DTYPES[dtype].itemsize
    blocks = 4 / BLOCK
    scale = torch.tensor([32.0], device=bench.device)
    block = _C.Quantizer("block1d", pow_2_scales=True)
    current, given = _C.Quantizer("current"), _C.Quantizer("delayed", scale=scale)
    for op, quantizer, columnwise, bytes_, peer in (
        ("quantize_block_row", block, False, element + 1 + blocks, block_rows),
        ("quantize_block", block, True, element + 2 + 2 * blocks, block_both),
        ("cast_transpose", given, True, element + 2, lambda x: cast_transpose(x, scale)),
        ("cast_transpose_current", current, True, 2 * element + 2, cast_transpose_current),
    ):
        case = Case("9", op, "fp8", shape, "forward", bytes=round(n * bytes_))
        if not bench.selects(case):
            continue
        contenders = {
            "ours": lambda x, q=quantizer, both=columnwise: _C.quantize(q, x, True, both),
            "torch eager": peer,
        }
        if bench.cuda:
            contenders["torch compile"] = bench.compile(peer)
        bench.compare(case, contenders, lambda: (bench.randn(rows, cols, dtype=dtype),))


def run_ranges(bench, shape):
    rows, cols = shape
    quarter = rows // 4 * cols
    data = torch.empty(shape, dtype=torch.uint8, device=bench.device)
    for op, kind, scaling in (("master_range_current", "current", 0), ("master_range_block", "block2d", 2)):
        case = Case("9", op, "fp8", (quarter,), "forward", bytes=9 * quarter)
        if not bench.selects(case):
            continue
        quantizer = _C.Quantizer(kind)
        blocks = [-(-n // BLOCK) for n in shape] if scaling else [1]
        amaxes = torch.empty(blocks, device=bench.device)
        scale_inv = torch.empty([blocks[0], -(-blocks[1] // 4) * 4] if scaling else [1], device=bench.device)

        def in_part(x, quantizer=quantizer, scaling=scaling, amaxes=amaxes, scale_inv=scale_inv):
            where = shape, quarter + 8, torch.bfloat16  # in the middle of a row
            quantize_range_amax(x, amaxes, *where, scaling=scaling)
            quantize_range_cast(x, data, scale_inv, *where, quantizer.spec, amaxes=amaxes)

        def whole(x, quantizer=quantizer):
            return _C.quantize(quantizer, x.bfloat16().view(-1, cols), True, False)

        contenders = {"ours": in_part, "whole, after a cast": whole}
        bench.compare(case, contenders, lambda: (bench.randn(quarter, dtype="fp32"),))


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
    run_ranges(bench, (GPU_SHAPES if bench.cuda else CPU_SHAPES)[0][1])
    bench.finish()


if __name__ == "__main__":
    main()
