"""`import transformer_engine_torch as tex`: the element types that clients take from there, and nothing else. The
extension itself is transformer_engine.pytorch's own."""

from transformer_engine.pytorch.constants import DType as DType


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"transformer_engine_torch has no attribute {name!r}: DType is all that it has here; use "
        "transformer_engine.pytorch, whose te.functional holds the operations"
    )
