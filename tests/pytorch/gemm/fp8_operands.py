# FP8 operands for the suites of products: uint8 data and scales in the layouts of transformer_engine/quantize.h, made
# by plain torch, and their values in float64. Two kinds: small whole numbers under scales that are powers of two, whose
# products are exact in any order and any accumulator, so that results must be equal; and normal values for bounds.
import torch

TENSOR, BLOCK_1D, BLOCK_2D = 0, 1, 2
NAMES = {TENSOR: "tensor", BLOCK_1D: "1d", BLOCK_2D: "2d"}
TORCH_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # by the code's e5m2


def blocks(n):
    return -(-n // 128)


def rounded_up(n, to):
    return -(-n // to) * to


def scales_shape(scaling, outer, depth):
    if scaling == BLOCK_1D:
        return blocks(depth), rounded_up(outer, 4)
    if scaling == BLOCK_2D:
        return blocks(outer), rounded_up(blocks(depth), 4)
    return (2,)


def over_elements(scale_inv, scaling, outer, depth):
    """The scale of each element, [outer, depth]."""
    row, col = torch.arange(outer)[:, None], torch.arange(depth)[None, :]
    if scaling == BLOCK_1D:
        return scale_inv[col // 128, row]
    if scaling == BLOCK_2D:
        return scale_inv[row // 128, col // 128]
    return scale_inv[0].expand(outer, depth)


def padded(data):
    """data [outer, depth] in memory with rows and pitch rounded up to 16: zeros beyond its columns, NaN beyond its rows
    (products may read those, results must not show them)."""
    outer, depth = data.shape
    memory = torch.full((rounded_up(outer, 16), rounded_up(depth, 16)), 0xFF, dtype=torch.uint8)
    memory[:outer] = 0
    memory[:outer, :depth] = data
    return memory


class Operand:
    """data, scale_inv: as te::gemm_fp8 takes them, on `device`; code; value: float64 [outer, depth] on the CPU."""

    def __init__(self, outer, depth, scaling, e5m2, device, whole=True, in_padded=True):
        x = torch.randint(-2, 3, (outer, depth)).float() if whole else torch.randn(outer, depth)
        shape = scales_shape(scaling, outer, depth)
        power = torch.randint(-2, 3, shape).float().exp2()
        scale_inv = power if whole else torch.rand(shape) + 0.5
        if scaling == BLOCK_1D:
            scale_inv[:, outer:] = 0
        elif scaling == BLOCK_2D:
            scale_inv[:, blocks(depth) :] = 0
        else:
            scale_inv[1] = 1 / scale_inv[0]
        fp8 = x.to(TORCH_DTYPES[e5m2])
        self.scaling, self.e5m2, self.code = scaling, e5m2, 2 * scaling + int(e5m2)
        self.value = fp8.double() * over_elements(scale_inv, scaling, outer, depth).double()
        bytes_ = fp8.view(torch.uint8)
        self.data = padded(bytes_).to(device)[:outer, :depth] if in_padded else bytes_.to(device)
        self.scale_inv = scale_inv.to(device)

    @property
    def arguments(self):
        return self.data, self.scale_inv, self.code
