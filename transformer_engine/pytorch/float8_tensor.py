"""Float8Tensor at the place where older clients look for it."""

from transformer_engine.pytorch.tensor import Float8Tensor as Float8Tensor
