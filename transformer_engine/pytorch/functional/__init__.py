"""Functional form of each op. Eager calls the extension directly; under torch.compile the same call becomes
torch.ops.te.<op>, the same C++ function behind a schema. This is the only place that chooses between the two."""

from transformer_engine.pytorch.functional.activation import activation, activation_kinds

__all__ = ["activation", "activation_kinds"]
