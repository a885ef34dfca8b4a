# FP8 products for the tests: a ProductQuantization of each recipe with its state at hand, and the same three products
# spelled out of the ops' own functions, which have tests of their own.
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import _C

RECIPES = ("delayed", "current", "block")


def quantizer(recipe, device, *, e5m2=False, weight=False, scale=1.0):
    """(native quantizer, scale, amax); the latter two only of delayed scaling."""
    if recipe == "delayed":
        state = torch.full((1,), scale, device=device), torch.zeros(1, device=device)
        return _C.Quantizer("delayed", e5m2, False, 0.0, *state), *state
    if recipe == "current":
        return _C.Quantizer("current", e5m2, False, 0.0), None, None
    return _C.Quantizer("block2d" if weight else "block1d", False, True, 0.0), None, None


@dataclass
class Product:
    """One weight's quantization and the amaxes that delayed scaling saw."""

    recipe: str
    native: object
    quantizers: dict
    amaxes: dict
    splits: tuple

    @property
    def spec(self):
        return self.native.spec


def product(recipe, device="cpu", scale=3.0):
    made = {
        "x": quantizer(recipe, device, scale=scale),
        "weight": quantizer(recipe, device, weight=True, scale=2 * scale),
        "dy": quantizer(recipe, device, e5m2=recipe != "block", scale=5 * scale),
    }
    splits = (recipe == "block", True, True)
    native = _C.ProductQuantization(*(q for q, _, _ in made.values()), *splits)
    quantizers = {name: q for name, (q, _, _) in made.items()}
    return Product(recipe, native, quantizers, {name: amax for name, (_, _, amax) in made.items()}, splits)


def spelled_out(p, x, weight, bias, dy):
    """(y, dx, dweight, dbias) of a linear layer, product by product."""
    q_x = _C.quantize(p.quantizers["x"], x, True, True)
    q_weight = _C.quantize(p.quantizers["weight"], weight, True, True)
    q_dy = _C.quantize(p.quantizers["dy"], dy, True, True)
    fast = [not split for split in p.splits]
    y = _C.gemm_fp8(q_weight, False, q_x, False, x.dtype, bias, fast[0])
    dx = _C.gemm_fp8(q_weight, True, q_dy, False, x.dtype, None, fast[1])
    dweight = _C.gemm_fp8(q_x, True, q_dy, True, x.dtype, None, fast[2])
    dbias = dy.reshape(-1, dy.shape[-1]).float().sum(0)
    return y.view(dy.shape), dx.view(x.shape), dweight, dbias
