"""Export to ONNX: the name that clients import. Exporting is not here yet."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch._absent import refusal


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Modules called inside can be exported. enabled=False: nothing changes."""
    if enabled:
        raise refusal("onnx_export", "export to ONNX is", "pass enabled=False")
    yield
