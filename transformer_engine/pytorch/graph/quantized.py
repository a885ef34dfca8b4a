"""Quantization state around captures: scales and histories, saved and put back. Quantizes nothing."""

from collections.abc import Iterable

from transformer_engine.pytorch._absent import absent


@absent("FP8 is")
def save_fp8_tensors(modules: Iterable[object], recipe: object | None) -> list | None:
    """The scales and histories of modules, as they are now."""


@absent("FP8 is")
def restore_fp8_tensors(modules: Iterable[object], fp8_tensors: list | None) -> None:
    """Puts back what save_fp8_tensors returned."""
