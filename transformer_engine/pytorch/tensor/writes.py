"""New values in a quantized tensor: quantized into its memory, or bytes of another one of its format. aliases.py
updates other tensors in that memory."""

from typing import Any

import torch

from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.registry import AnyQuantized


class Writes:
    """The part of a quantized storage that takes new values."""

    def _must_be_writable(self) -> None:
        self._must_have_memory()
        self._must_reach_aliases()

    def _must_have_memory(self) -> None:
        for part in self._tensors().values():
            layout.must_have_memory(part)

    def _get_quantizer(self) -> Any:
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> AnyQuantized:
        """Quantizes tensor's values into this one. noop_flag: float32 [1]; unless it is 0, nothing is written."""
        if isinstance(tensor, AnyQuantized):
            if noop_flag is None and self.copy_from_storage(tensor):
                return self
            tensor = tensor.dequantize()
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: AnyQuantized) -> bool:
        """Copies src's bytes and scales, in its own directions. Returns False, and changes nothing, if src is of
        another format."""
        if not self._same_format(src):
            return False
        if tuple(src.size()) != tuple(self.size()):
            raise ValueError(
                f"{type(self).__name__}.copy_from_storage: argument 'src' has shape {tuple(src.size())}, wanted "
                f"{tuple(self.size())}."
            )
        for kind, present in self.get_usages().items():
            if present and not src.get_usages()[kind]:
                src = src._twin()
                src.update_usage(**{f"{kind}_usage": True})
        if self._rows_of is not None:
            self._write_quantized_rows(src)
            return True
        self._must_be_writable()
        src._must_have_memory()
        with torch.no_grad():
            for name, own in self._tensors().items():
                own.copy_(getattr(src, name))
        self._written()
        self._took()
        return True

    def _take(self, parts: dict[str, torch.Tensor | None], noop_flag: torch.Tensor | None = None) -> None:
        """Copies `parts` into its own, if noop_flag is None or holds 0."""
        with torch.no_grad():
            for name, own in self._tensors().items():
                given = parts[name]
                own.copy_(given if noop_flag is None else torch.where(noop_flag == 0, given, own))

    def _written(self) -> None:
        """Runs after each write: every direction of it holds new values."""
        self._count_write()
        self._reach_aliases()

    def _count_write(self) -> None:
        """Raises the versions, so that a backward that saved the parts fails: torch does not inside
        __torch_dispatch__."""
        torch.autograd.graph.increment_version(self._tensors().values())

    def _values_to_come(self) -> None:
        """Runs before it is filled with values unrelated to its present ones."""
        if self._quantizer is not None:
            self._quantizer._values_to_come()

    def _took(self) -> None:
        """Runs after it has taken data that another quantizer made."""
        if self._quantizer is not None:
            self._quantizer._took(self)
