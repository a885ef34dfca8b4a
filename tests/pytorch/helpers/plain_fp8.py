# FP8 in plain PyTorch: what the engine's bytes and scales are compared with, and, for the module tests, products of
# fake-quantized values and delayed scaling's state. Written from the formulas of transformer_engine/quantize.h, block
# by block on zero-padded copies; it shares no code with the package.
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


def scale_of(amax, e5m2, pow_2=False, epsilon=0.0):
    """float32 throughout; 1 where there is nothing to scale."""
    amax = amax.float().clamp(min=epsilon)
    scale = torch.full_like(amax, fp8_max(e5m2)) / amax  # a number divided by it would be multiplied by its reciprocal
    scale = torch.where(scale.isinf(), FLT_MAX, scale)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
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


# ---- products of fake-quantized values, in float64 ----


def fake(t, scale, e5m2):
    """t's values after a trip through FP8, as float64; scale broadcasts."""
    return to_bytes(t, scale, e5m2).view(fp8_dtype(e5m2)).double() * (1 / scale).double()


def block_amaxes(t, rows, cols):
    """The amax of each block of rows x cols, repeated over it."""
    m, n = t.shape
    tiles = padded(magnitudes(t), up(m, rows), up(n, cols)).unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    return tiles.amax((1, 3)).repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:m, :n]


class PlainScales:
    """Of one tensor under delayed scaling."""

    def __init__(self, length, e5m2=False):
        self.scale, self.history, self.e5m2 = torch.tensor(1.0), [0.0] * length, e5m2

    def see(self, t):
        self.history[0] = max(self.history[0], t.detach().float().abs().max().item())

    def update(self):
        amax = max(self.history)
        if amax > 0:
            self.scale = scale_of(torch.tensor(amax), self.e5m2)
        if self.history[0]:
            self.history = [0.0, *self.history[2:], self.history[0]][: len(self.history)]


class Operand:
    """A tensor as each product reads it: along its rows (reduced over columns) and along its columns."""

    def __init__(self, recipe, t, role, scales=None):
        e5m2 = role == "dy" and recipe != "block"
        if recipe == "block":
            two = role == "weight"
            self.rows = fake(t, scale_of(block_amaxes(t, 128 if two else 1, 128), False, True), False)
            self.columns = fake(t, scale_of(block_amaxes(t, 128, 128 if two else 1), False, True), False)
        else:
            scale = scales.scale if recipe == "delayed" else scale_of(t.float().abs().max(), e5m2)
            self.rows = self.columns = fake(t, scale, e5m2)


def linear(recipe, x, weight, bias, dy, scales=None):
    """{name: (value, sum of magnitudes)} of y, dx, dweight, dbias in float64, of 2-D x and dy."""
    scales = scales or dict.fromkeys(("x", "weight", "dy"))
    x_q, w_q = (Operand(recipe, t, role, scales[role]) for t, role in ((x, "x"), (weight, "weight")))
    dy_q = Operand(recipe, dy, "dy", scales["dy"])
    added = 0.0 if bias is None else bias.double()
    results = {
        "y": (x_q.rows @ w_q.rows.T + added, x_q.rows.abs() @ w_q.rows.abs().T + (added * 0 + abs(added))),
        "dx": (dy_q.rows @ w_q.columns, dy_q.rows.abs() @ w_q.columns.abs()),
        "dweight": (dy_q.columns.T @ x_q.columns, dy_q.columns.abs().T @ x_q.columns.abs()),
    }
    if bias is not None:
        results["dbias"] = dy.double().sum(0), dy.double().abs().sum(0)
    return results
