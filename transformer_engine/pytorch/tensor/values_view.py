"""Views of a quantized tensor that its memory cannot represent: a transpose, a column, a row across blocks. Their
values can be read; a write would reach only a copy, and raises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transformer_engine.pytorch._internal.torch_private import disabled_torch_function_impl, make_subclass, pytree
from transformer_engine.pytorch.tensor import engine


def is_view(func: Any) -> bool:
    """Whether it returns a view of its argument's memory and writes nothing."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def written_by(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], wanted: Callable[[object], bool]
) -> list[torch.Tensor]:
    """The arguments that func writes to and that are `wanted`, each once."""
    found = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if wanted(one):
                found[id(one)] = one
    return list(found.values())


def shown(result: Any, func: Any, format_name: str) -> Any:
    """func's result, computed from values of a quantized tensor: read-only if func makes views."""
    if not is_view(func):
        return result
    source_op = func.overloadpacket.__name__

    def marked(one: Any) -> Any:
        plain = type(one) is torch.Tensor and engine.is_plain(one)  # a tracer of a view writes it itself
        return ValuesView._of(one, format_name, source_op) if plain else one

    return pytree.tree_map(marked, result)


def values_of(tensor: Any) -> Any:
    """The plain tensor of a ValuesView; anything else as it is."""
    return tensor._values if isinstance(tensor, ValuesView) else tensor


class _Plain(torch.autograd.Function):
    """The tensor of a ValuesView, with its history."""

    @staticmethod
    def forward(ctx: Any, view: "ValuesView") -> torch.Tensor:
        return view._values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ValuesView(torch.Tensor):
    """Values of a quantized tensor, read-only. Every operation sees a plain tensor."""

    _values: torch.Tensor
    _format_name: str
    _source_op: str

    @classmethod
    def _of(cls, values: torch.Tensor, format_name: str, source_op: str) -> "ValuesView":
        self = make_subclass(cls, values)
        self._values, self._format_name, self._source_op = values, format_name, source_op
        return self

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in written_by(func, args, kwargs, lambda given: isinstance(given, cls)):
            raise RuntimeError(
                f"{one._format_name}: {func.overloadpacket.__name__} would write to the result of {one._source_op}, "
                "a copy of its values, so the write would be lost. Write to the whole tensor (t.copy_(values)), to "
                "rows of it that stay quantized (t[first:last]), or to a copy (t.dequantize())."
            )
        result = func(*pytree.tree_map(values_of, list(args)), **pytree.tree_map(values_of, kwargs))
        first = next((a for a in args if isinstance(a, cls)), None)
        return result if first is None else shown(result, func, first._format_name)

    def _why_not_written(self) -> str:
        """For code that writes memory itself, and checks before (csrc/ops/optimizer_adam.cpp)."""
        return (
            f"is the result of {self._source_op} on a {self._format_name}, a copy of its values, so a write would be "
            "lost, wanted the whole tensor, or rows of it that stay quantized (t[first:last])."
        )

    def plain(self) -> torch.Tensor:
        """The same values in the same memory, as a plain tensor; differentiable."""
        return _Plain.apply(self)

    def numpy(self, *, force: bool = False) -> Any:
        """As torch's, read-only."""
        if self.requires_grad and not force:
            return torch.Tensor.numpy(self)  # raises torch's error
        array = self._values.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """As torch's."""
        return self._values.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return repr(self._values)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        memo[id(self)] = result = self._values.clone().requires_grad_(self.requires_grad)
        return result

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self._values.__reduce_ex__(protocol)
