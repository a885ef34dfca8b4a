"""Export to ONNX: the context that clients enter. Exporting is not available in this version."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch._internal.absent import names_without_a_body, refusal
from transformer_engine.pytorch._internal.keywords import check_keywords

_EXPORT = "export to ONNX is"
__getattr__ = names_without_a_body(__name__, {"te_translation_table": (_EXPORT, "")})


@check_keywords()
@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Modules called inside can be exported. enabled=False: nothing changes."""
    if enabled:
        raise refusal("onnx_export", _EXPORT, "pass enabled=False")
    yield
