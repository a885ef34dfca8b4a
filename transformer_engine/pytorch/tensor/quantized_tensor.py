"""A quantized storage that behaves as a torch.Tensor of its nominal dtype. dispatch.py has its operations. It is
independent of formats."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch._internal.torch_private import disabled_torch_function_impl, make_wrapper_subclass
from transformer_engine.pytorch.tensor import dispatch, flattening
from transformer_engine.pytorch.tensor.fields import own_attributes
from transformer_engine.pytorch.tensor.registry import FLOATS
from transformer_engine.pytorch.tensor.sharding import FSDPHooks
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage


class _Dequantize(torch.autograd.Function):
    """Straight through: the gradient of the values is the gradient of the quantized tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: "QuantizedTensor", dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor._dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad.to(ctx.dtype), None


class QuantizedTensor(QuantizedTensorStorage, FSDPHooks, torch.Tensor):
    """A tensor whose values are quantized: it reports its nominal dtype, and every operation without a rule computes
    with its values in high precision.

    A direct subclass keeps its data in attributes of its own and overrides `dequantize` (without gradients) and, if it
    takes new values, `quantize_`; aliases share the attributes, copies copy them."""

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: torch.device | None = None,
        fake_dtype: torch.dtype | None = None,
    ) -> "QuantizedTensor":
        if cls is QuantizedTensor:
            raise TypeError("QuantizedTensor: make one by a quantizer, or a format's class from its parts by name.")
        if dtype not in FLOATS:
            raise ValueError(f"{cls.__name__}: argument 'dtype' is {dtype}, wanted float32, float16 or bfloat16.")
        self = make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=requires_grad)
        self._dtype = dtype
        return self

    # torch.Tensor's own attributes are right.
    size = torch.Tensor.size
    shape = torch.Tensor.shape
    device = torch.Tensor.device
    dtype = torch.Tensor.dtype
    numel = torch.Tensor.numel
    view = torch.Tensor.view

    def _logical_shape(self) -> torch.Size:
        return torch.Tensor.size(self)

    def _like(
        self,
        parts: dict[str, torch.Tensor | None],
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        if self._is_direct():
            return self._with_attributes(dtype, requires_grad)
        return type(self)(
            shape=torch.Size(shape),
            dtype=self.dtype if dtype is None else dtype,
            requires_grad=requires_grad,
            **self._fields(parts),
        )

    # ---- a direct subclass ----

    @classmethod
    def _is_direct(cls) -> bool:
        """Whether it declares no parts."""
        return not cls._parts

    def _with_attributes(self, dtype: torch.dtype | None = None, requires_grad: bool = False) -> "QuantizedTensor":
        """Another tensor with the same attributes."""
        dtype = self.dtype if dtype is None else dtype
        result = QuantizedTensor.__new__(type(self), self.shape, dtype, requires_grad=requires_grad, device=self.device)
        result.__dict__.update(own_attributes(self))
        return result

    def _dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_direct():
            return super()._dequantize(dtype)
        if type(self).dequantize is QuantizedTensor.dequantize:
            raise NotImplementedError(f"{type(self).__name__}: a subclass of QuantizedTensor has to define dequantize.")
        with torch.no_grad():
            return self.dequantize(dtype=dtype)

    def _differentiable(self) -> torch.Tensor:
        """Its values, whose gradient is its own gradient, also if a subclass overrides dequantize."""
        return _Dequantize.apply(self, self.dtype)

    def copy_from_storage(self, src: QuantizedTensorStorage) -> bool:
        return not self._is_direct() and super().copy_from_storage(src)

    @classmethod
    def make_like(
        cls,
        tensor: "QuantizedTensor",
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """Another tensor on the same data. shape, dtype: nominal, by default tensor's."""
        parts = (
            tensor._tensors() if shape is None or tuple(shape) == tuple(tensor.shape) else tensor._viewed(tuple(shape))
        )
        if parts is None:
            raise ValueError(
                f"{cls.__name__}.make_like: argument 'shape' is {tuple(shape)} for {tuple(tensor.shape)}, wanted one "
                "with the same last dimension."
            )
        shape = tensor.shape if shape is None else shape
        return tensor._alias(parts, shape, dtype=dtype, requires_grad=requires_grad)

    def to_dtype(self, dtype: torch.dtype) -> "QuantizedTensor":
        """The same data under another nominal dtype."""
        return self._alias(self._tensors(), self.shape, dtype=dtype, requires_grad=self.requires_grad)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor, by default in the nominal dtype; differentiable."""
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._dequantize(dtype)

    def float(self, **_: object) -> torch.Tensor:
        """dequantize(float32)."""
        return self.dequantize(dtype=torch.float32)

    def half(self, **_: object) -> torch.Tensor:
        """dequantize(float16)."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self, **_: object) -> torch.Tensor:
        """dequantize(bfloat16)."""
        return self.dequantize(dtype=torch.bfloat16)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> "QuantizedTensor":
        with torch.no_grad():
            return super().quantize_(tensor, noop_flag=noop_flag)

    def _count_write(self) -> None:
        super()._count_write()
        torch.autograd.graph.increment_version(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Empty: the memory belongs to the parts."""
        return torch.UntypedStorage(0, device=self.device)

    def data_ptr(self) -> int:
        """Errors: ValueError; the parts have addresses, the values do not."""
        raise ValueError(
            f"{type(self).__name__}.data_ptr: its values are not in memory; dequantize() it to get plain data, or use "
            "pack_state_dict for files of plain tensors."
        )

    def _get_data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    def _set_data(self, tensor: torch.Tensor) -> None:
        """Plain values are quantized into this one; a quantized tensor's data replace its own. The shape may differ."""
        if isinstance(tensor, QuantizedTensor):
            if not (type(self) is type(tensor) if self._is_direct() else self._same_format(tensor)):
                raise ValueError(
                    f"{type(self).__name__}.data: got a {type(tensor).__name__} {tuple(tensor.shape)}, wanted the same "
                    "format, or plain values."
                )
            self._take_data(tensor)
            if tensor._quantizer is not self._quantizer:
                self._took()
        elif tensor.shape == self.shape or self._is_direct():
            self.quantize_(tensor.to(self.device))
        else:
            self._must_hold_data("data")
            quantizer = self._get_quantizer().copy()
            quantizer.internal = False
            quantizer.set_usage(**{f"{kind}": present for kind, present in self.get_usages().items()})
            values = tensor.detach().to(self.device)
            self._take_data(quantizer._held(values if values.dtype in FLOATS else values.to(self.dtype)))

    def _take_data(self, tensor: "QuantizedTensor") -> None:
        torch.Tensor.data.__set__(self, tensor)
        self._leave()
        for name in (*self._parts, "_dtype", "_rows_of"):
            setattr(self, name, getattr(tensor, name))
        self.__dict__["_transpose_invalid"] = tensor.__dict__.get("_transpose_invalid", False)
        if self._is_direct():
            self.__dict__.update(own_attributes(tensor))
        self._join(tensor)
        self._count_write()

    data = property(_get_data, _set_data)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        if not self._is_direct():
            return QuantizedTensorStorage.__repr__(self)
        values = self._dequantize(torch.float32)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, data={values})"

    # ---- operations ----

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.run(func, args, kwargs or {})

    # ---- taken apart and assembled ----

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, object]]:
        if self._is_direct():
            raise NotImplementedError(
                f"{type(self).__name__}: torch.compile cannot take a tensor of a client's class apart, because its "
                "attributes are unknown; keep it out of the compiled region, or define __tensor_flatten__."
            )
        details = {name: getattr(self, name) for name in self._details}
        return list(self._tensors()), flattening.context(details, self.dtype, self.requires_grad)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner_tensors: dict[str, torch.Tensor],
        context: dict[str, object],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> "QuantizedTensor":
        details = flattening.details_of(context)
        fields = {part.argument: inner_tensors.get(name) for name, part in cls._parts.items()}
        fields |= {argument: details[name] for name, argument in cls._details.items()}
        return cls(shape=outer_size, dtype=context["dtype"], requires_grad=context["requires_grad"], **fields)

    def __reduce_ex__(self, protocol: int) -> tuple:
        if self._is_direct():
            raise NotImplementedError(
                f"{type(self).__name__}: files store the formats of this library alone; save dequantize(), or define "
                "__reduce_ex__."
            )
        return super().__reduce_ex__(protocol)

    def __setstate__(self, attributes: dict[str, object]) -> None:
        """Restores attributes that clients had set on the saved tensor."""
        hidden = {*self._parts, *self._details, *self._bookkeeping, "_is_param"} & set(attributes)
        if hidden:
            raise ValueError(f"{type(self).__name__} in a file: it sets {sorted(hidden)}, which are not attributes.")
        self.__dict__.update(attributes)

    def __deepcopy__(self, memo: dict) -> "QuantizedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"{type(self).__name__}: a tensor with a history has no deepcopy: detach() it.")
        result = self._like(self._copied(), self.shape, requires_grad=self.requires_grad)
        memo[id(self)] = result
        quantizer = copy.deepcopy(self._quantizer, memo)
        for name, value in own_attributes(self).items():
            setattr(result, name, copy.deepcopy(value, memo))
        result._quantizer = quantizer
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result
