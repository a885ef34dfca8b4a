# FP8 quantization in plain PyTorch, on the CPU: what the engine's bytes and scales are compared with. Written from the
# formulas of transformer_engine/quantize.h, block by block on zero-padded copies; it shares no code with the package.
import torch
import torch.nn.functional as F

BLOCK = 128
FLT_MAX = torch.finfo(torch.float32).max
TENSOR, BLOCK_1D, BLOCK_2D = 0, 1, 2
SCALINGS = {"current": TENSOR, "delayed": TENSOR, "block1d": BLOCK_1D, "block2d": BLOCK_2D}


def fp8_dtype(e5m2):
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def fp8_max(e5m2):
    return 57344.0 if e5m2 else 448.0


def drop_mantissa(scale):
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def scale_of(amax, e5m2, pow_2, epsilon):
    amax = amax.float().clamp(min=epsilon)
    scale = torch.tensor(fp8_max(e5m2)) / amax
    scale = torch.where(scale.isinf(), torch.tensor(FLT_MAX), scale)
    scale = torch.where((amax == 0) | amax.isinf(), torch.tensor(1.0), scale)
    return drop_mantissa(scale) if pow_2 else scale


def magnitudes(x):
    return torch.where(x.isnan(), 0.0, x.float().abs())


def to_bytes(x, scale, e5m2):
    limit = fp8_max(e5m2)
    return (x.float() * scale).clamp(-limit, limit).to(fp8_dtype(e5m2)).view(torch.uint8)


def padded(t, rows, cols):
    return F.pad(t, (0, cols - t.shape[1], 0, rows - t.shape[0]))


def up(n, to):
    return -(-n // to) * to


def blocks(x):
    """[row blocks, 128, column blocks, 128], zeros beyond x."""
    rows, cols = (up(n, BLOCK) for n in x.shape)
    return padded(x, rows, cols).view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)


def quantize_1d(x, e5m2, pow_2, epsilon):
    rows, cols = x.shape
    amax = magnitudes(blocks(x)).amax(-1).flatten(0, 1)[:rows]  # [rows, column blocks]
    scale = scale_of(amax, e5m2, pow_2, epsilon)
    wide = scale.repeat_interleave(BLOCK, 1)[:, :cols]
    return to_bytes(x, wide, e5m2), padded((1 / scale).T, -(-cols // BLOCK), up(rows, 4))


def quantize_2d(x, e5m2, pow_2, epsilon):
    rows, cols = x.shape
    scale = scale_of(magnitudes(blocks(x)).amax((1, 3)), e5m2, pow_2, epsilon)
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    return to_bytes(x, wide, e5m2), scale


def quantize(x, scaling, e5m2, pow_2=False, epsilon=0.0, scale=None):
    """(rowwise, its scales, columnwise, its scales) of a matrix; the scales of TENSOR are [scale_inv, scale]."""
    x = x.detach().cpu()
    if scaling == BLOCK_1D:
        return *quantize_1d(x, e5m2, pow_2, epsilon), *quantize_1d(x.T, e5m2, pow_2, epsilon)
    if scaling == BLOCK_2D:
        data, s = quantize_2d(x, e5m2, pow_2, epsilon)
        row_blocks, col_blocks = s.shape
        return (
            data,
            padded(1 / s, row_blocks, up(col_blocks, 4)),
            data.T,
            padded((1 / s).T, col_blocks, up(row_blocks, 4)),
        )
    if scale is None:
        amax = magnitudes(x).max() if x.numel() else torch.tensor(0.0)
        scale = scale_of(amax, e5m2, pow_2, epsilon)
    data, scales = to_bytes(x, scale, e5m2), torch.stack((1 / scale, scale)).flatten()
    return data, scales, data.T, scales


def dequantize(data, scale_inv, scaling, e5m2, dtype):
    """Of one direction, by its own rows and columns; the columnwise one's result is the transpose."""
    rows, cols = data.shape
    values = data.contiguous().view(fp8_dtype(e5m2)).float()
    if scaling == TENSOR:
        return (values * scale_inv[0]).to(dtype)
    if scaling == BLOCK_1D:
        wide = scale_inv[:, :rows].T.repeat_interleave(BLOCK, 1)[:, :cols]
    else:
        wide = scale_inv.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return (values * wide).to(dtype)


def column_sums(x):
    """Over each 128 rows: of 4 rows in order, of neighbours, of neighbours of these, of the 8 results in order."""
    rows, cols = x.shape
    quads = padded(x.detach().cpu().float(), up(rows, BLOCK), cols).view(-(-rows // BLOCK), 8, 2, 2, 4, cols)
    total = torch.zeros(quads.shape[:4] + (cols,))
    for i in range(4):
        total = total + quads[:, :, :, :, i]
    total = total[:, :, :, 0] + total[:, :, :, 1]
    total = total[:, :, 0] + total[:, :, 1]
    result = torch.zeros(total.shape[0], cols)
    for w in range(8):
        result = result + total[:, w]
    return result


def bias_gradient(x):
    total = torch.zeros(x.shape[1])
    for row in column_sums(x):
        total = total + row
    return total.to(x.dtype)
