# Helpers of the suites of gemm: operands, products in float64, calls in every form. No test is here.
import torch
from support import randn, rounding, sum_error, wide

from transformer_engine.pytorch.functional import gemm

LAYOUTS = ("TN", "NN", "NT")
# rows and columns of d, and the reduced depth
SHAPES = ((1, 1, 1), (3, 5, 7), (8, 16, 24), (17, 130, 33), (1, 64, 512), (96, 128, 256))


def operands(layout, rows, cols, depth, dtype, device):
    a = (cols, depth) if layout == "TN" else (depth, cols)
    b = (depth, rows) if layout == "NT" else (rows, depth)
    return randn(*a, dtype=dtype, device=device), randn(*b, dtype=dtype, device=device)


def product(a, b, layout):
    """(d, sum of the products' magnitudes) in float64."""
    a64, b64 = wide(a).flatten(0, -2), wide(b).flatten(0, -2)
    left = b64.mT if layout == "NT" else b64
    right = a64.mT if layout == "TN" else a64
    return left @ right, left.abs() @ right.abs()


def may_refuse(epilogue, rows, cols, depth, device):
    """cuBLASLt has no algorithm for some fused epilogues at sizes that 8 does not divide. Never without them."""
    return device == "cuda" and epilogue in ("gelu", "dgelu", "bgrad") and any(n % 8 for n in (rows, cols, depth))


def call(a, b, layout, epilogue, sizes, **arguments):
    """gemm's results, or None for a combination that may be refused and was, by name."""
    try:
        return gemm(a, b, layout, epilogue=epilogue, **arguments)
    except NotImplementedError as error:
        if not may_refuse(epilogue, *sizes, a.device.type):
            raise
        for word in ("te_gemm", "no algorithm", f"layout {layout}", "epilogue"):
            assert word in str(error), error
        return None


def each(layout, dtype, device):
    for sizes in SHAPES:
        yield sizes, *operands(layout, *sizes, dtype, device)


# Bounds. A product of `depth` terms is summed in float32, in any order; tensor cores truncate where adders round, so a
# term costs 2u: 2 depth u on the sum of the magnitudes. Adding a bias is one term more. The result is rounded once.


def accumulated(magnitude, depth, extra_terms=0):
    return sum_error(magnitude, 2 * depth + extra_terms)


def first_rounding(product, dtype, device):
    """cuBLASLt may round the product to a 16-bit d's dtype before the next operation (seen on an H200: a bias at sizes
    that 8 does not divide, gelu, adding to a 16-bit d)."""
    return rounding(product, dtype) if device == "cuda" and dtype != torch.float32 else 0.0
