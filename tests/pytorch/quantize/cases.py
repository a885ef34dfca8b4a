# Helpers of the suites of quantization: inputs, quantizers, the comparison of a quantized matrix with plain_fp8.py.
import plain_fp8 as plain
import torch
from support import assert_same_bits

from transformer_engine.pytorch import _C

KINDS = ("current", "delayed", "block1d", "block2d")
DIRECTIONS = ((True, False), (False, True), (True, True))
SHAPES = ((0, 0), (0, 300), (5, 0), (1, 1), (1, 16), (3, 5), (17, 130), (128, 128), (129, 300), (256, 384), (300, 4097))


def draw(rows, cols, dtype, device, seed=0):
    """Normal values over many orders of magnitude, so that blocks have different scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    exponents = torch.randint(-3, 4, (rows, cols), generator=generator)
    return (x * 2.0**exponents).to(dtype).to(device)


def quantizer(kind, device, e5m2=False, pow_2=False, epsilon=0.0, scale=1.5):
    if kind != "delayed":
        return _C.Quantizer(kind, e5m2, pow_2, epsilon)
    return _C.Quantizer(kind, e5m2, scale=torch.tensor([scale], device=device), amax=torch.zeros(1, device=device))


def expected(kind, x, e5m2=False, pow_2=False, epsilon=0.0, scale=1.5):
    given = torch.tensor(scale) if kind == "delayed" else None
    return plain.quantize(x, plain.SCALINGS[kind], e5m2, pow_2, epsilon, given)


def same_bytes(got, want, e5m2, what):
    """Equal, but that any NaN equals any other."""
    assert got.dtype == torch.uint8 and got.shape == want.shape, (what, got.shape, want.shape)
    got, want = got.cpu(), want.contiguous()
    nan = [t.view(plain.fp8_dtype(e5m2)).float().isnan() for t in (got.contiguous(), want)]
    wrong = (got != want) & ~(nan[0] & nan[1])
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} bytes differ"


def check_padding(data, what):
    """Rows start on 16 bytes; there are rows up to a multiple of 16; all bytes beyond the matrix are 0."""
    rows, cols = data.shape
    pitch = data.stride(0) if rows * cols else 16
    assert pitch % 16 == 0 and data.data_ptr() % 16 == 0, what
    if rows * cols == 0:
        return
    whole = data.as_strided((plain.up(rows, 16), pitch), (pitch, 1)).clone()
    whole[:rows, :cols] = 0
    assert not whole.any(), f"{what}: padding is not 0"


def check_quantized(q, want, e5m2, what):
    for name, data, scale_inv, data_want, scales_want in (
        ("rowwise", q.rowwise, q.rowwise_scale_inv, want[0], want[1]),
        ("columnwise", q.columnwise, q.columnwise_scale_inv, want[2], want[3]),
    ):
        if data is None:
            assert scale_inv is None, what
            continue
        assert_same_bits(scale_inv.cpu(), scales_want, f"{what} {name} scales")
        same_bytes(data, data_want, e5m2, f"{what} {name}")
        check_padding(data, f"{what} {name}")
