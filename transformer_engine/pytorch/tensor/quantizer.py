"""The base of quantizers, each of which makes quantized tensors of one format, and which clients override in Python.
Formats' arithmetic is elsewhere."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.absent import refusal
from transformer_engine.pytorch.tensor import engine, flattening, layout, packing
from transformer_engine.pytorch.tensor.arguments import source_of
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, DATA, ROWWISE, PartSpec
from transformer_engine.pytorch.tensor.registry import FLOATS, QUANTIZERS, SCALINGS, Wanted
from transformer_engine.pytorch.tensor.settings import Settings
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage
from transformer_engine.pytorch.utils import resolve_device


class _Quantize(torch.autograd.Function):
    """Straight through: the gradient of the quantized tensor is the gradient of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: "Quantizer", dtype: torch.dtype | None) -> torch.Tensor:
        return quantizer._quantized(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad.dequantize() if isinstance(grad, QuantizedTensorStorage) else grad, None, None


class Quantizer(Settings):
    """Makes quantized tensors of one format. A quantizer in Python overrides quantize_impl (and update_quantized if its
    tensors take new values).

    rowwise_usage, columnwise_usage: the directions of its tensors. internal: its results are bare storages, without
    torch.Tensor's behaviour and without autograd."""

    tensor_class: ClassVar[type | None] = None
    storage_class: ClassVar[type | None] = None
    _python_written: ClassVar[bool] = True  # the engine calls back into Python
    _scalings: ClassVar[tuple[str, ...]] = ()  # its names in recipes: registry.SCALINGS

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def __init_subclass__(cls, python_written: bool | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if python_written is not None:
            cls._python_written = python_written
        elif {"quantize", "quantize_impl", "update_quantized", "__call__"} & set(vars(cls)):
            cls._python_written = True
        QUANTIZERS.setdefault(cls.__name__, cls)
        for scaling in vars(cls).get("_scalings", ()):
            if SCALINGS.setdefault(scaling, cls) is not cls:
                raise ValueError(
                    f"{cls.__name__}: its _scalings have {scaling!r}, which {SCALINGS[scaling].__name__} has "
                    "registered; wanted a name of its own."
                )

    # ---- quantizing ----

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        """tensor, quantized; differentiable, the gradient passes through unchanged. out: written instead of a new one.
        dtype: the nominal one, by default tensor's.

        NaN stays NaN and does not count for an amax. Errors: ValueError for integers, for FP8 or double data and
        without any requested direction, TypeError unless it is a tensor."""
        if out is not None:
            self.update_quantized(tensor, out)
            return out
        if not self.internal and torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            return _Quantize.apply(tensor, self, dtype)
        return self._quantized(tensor, dtype)

    def __call__(
        self, tensor: torch.Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensorStorage:
        """quantize."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def _quantized(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> QuantizedTensorStorage:
        result = self._by_impl(tensor)
        return result if dtype in (None, result.dtype) else result.to_dtype(dtype)

    def _by_impl(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """Clients override it."""
        result = self.quantize_impl(tensor)
        if not isinstance(result, QuantizedTensorStorage):
            raise TypeError(
                f"{type(self).__name__}.quantize_impl: it returned a {type(result).__name__}, wanted a quantized "
                "tensor; IdentityQuantizer leaves a tensor in high precision."
            )
        return result

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """tensor, quantized, in the directions of the usages."""
        x = source_of(type(self).__name__, tensor)
        self._must_want_something()
        native = self._quantize_by_engine(x, self.rowwise_usage, self.columnwise_usage)
        return self._of_native(native, x.shape, x.dtype)

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensorStorage, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensorStorage:
        """Quantizes src's values into dst, in dst's directions. noop_flag: float32 [1] on the device; unless it holds
        0, nothing is written. Errors: ValueError for a dst of another format or shape."""
        x = source_of(type(self).__name__, src).detach()
        self._must_fit(x, dst)
        self._write(x, dst, noop_flag)
        return dst

    def _write(self, x: torch.Tensor, dst: QuantizedTensorStorage, noop_flag: torch.Tensor | None = None) -> None:
        usages = dst.get_usages()
        if not any(usages.values()):
            raise RuntimeError(
                f"{type(self).__name__}.update_quantized: argument 'dst' holds no data (cleared, or saved for "
                "backward), wanted data in a direction; make one by make_empty()."
            )
        dst._must_be_writable()
        if dst._rows_of is not None:
            native = self._quantize_by_engine(x, rowwise=True, columnwise=False)
            dst._write_rows(self._of_native(native, x.shape, x.dtype), x, noop_flag)
            return
        if dst._is_pitched() and engine.is_plain(x, *dst._tensors().values()):
            self._quantize_by_engine(x, usages[ROWWISE], usages[COLUMNWISE], noop_flag, dst._native())
        else:  # traced, or its rows are not aligned for the engine
            native = self._quantize_by_engine(x, usages[ROWWISE], usages[COLUMNWISE])
            dst._take(dst._parts_of(native, dst.size()), noop_flag)
        dst._written()

    def _must_want_something(self) -> None:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ValueError(
                f"{type(self).__name__}: rowwise_usage and columnwise_usage are False, wanted at least one."
            )

    def _must_fit(self, x: torch.Tensor, dst: object) -> None:
        op = f"{type(self).__name__}.update_quantized"
        details = {n: v for n, v in self._details().items() if n != "_quantizer"}
        if self.storage_class is None or not isinstance(dst, self.storage_class):
            wanted = "another format" if self.storage_class is None else self.storage_class.__name__
            raise ValueError(f"{op}: argument 'dst' is a {type(dst).__name__}, wanted a {wanted}.")
        for name, value in details.items():
            if getattr(dst, name) != value:
                raise ValueError(f"{op}: argument 'dst' has {name[1:]} {getattr(dst, name)!r}, wanted {value!r}.")
        if tuple(dst.size()) != tuple(x.shape):
            raise ValueError(f"{op}: argument 'dst' has shape {tuple(dst.size())}, wanted {tuple(x.shape)}, src's.")

    # ---- the engine ----

    def _native(self) -> "_C.Quantizer":
        """The object that modules pass to the engine."""
        if self._is_python():  # not stored: the two would keep each other alive
            return _C.Quantizer("python", False, False, 0.0, python=self)
        return self._built_in()

    def _is_python(self) -> bool:
        """Whether the engine calls back for every tensor."""
        return self._python_written

    def _built_in(self) -> "_C.Quantizer":
        """The engine's own quantizer, kept while its arguments are the same objects."""
        arguments = self._engine_arguments()
        kept = self.__dict__.get("_kept")
        if kept is None or any(old is not new for old, new in zip(kept[0], arguments)):
            self.__dict__["_kept"] = kept = arguments, _C.Quantizer(*arguments)
        return kept[1]

    # The attributes on which _engine_arguments of the same class depends; None where it depends on other objects, too.
    _engine_fields: tuple[str, ...] | None = None

    def _engine_arguments(self) -> tuple:
        """Arguments of _C.Quantizer: kind, e5m2, pow_2_scales, amax_epsilon, scale, amax."""
        raise NotImplementedError(f"{type(self).__name__} has no built-in form: override quantize_impl.")

    def _quantize_by_engine(
        self,
        x: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        noop: torch.Tensor | None = None,
        out: "_C.Quantized | None" = None,
    ) -> "_C.Quantized":
        return engine.quantize(self._built_in(), x, rowwise, columnwise, noop, out)

    def _quantize_native(self, x: torch.Tensor, rowwise: bool, columnwise: bool) -> "_C.Quantized":
        """The engine calls it for a quantizer that is written in Python."""
        if type(self).quantize_impl is Quantizer.quantize_impl:
            return self._quantize_by_engine(x, rowwise, columnwise)
        twin = self.copy()
        twin.internal = True
        twin.set_usage(rowwise=rowwise, columnwise=columnwise)
        with torch.no_grad():
            result = twin._by_impl(x)
        usages = result.get_usages()
        lacking = [
            kind for kind, wanted in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if wanted and not usages[kind]
        ]
        if lacking:
            raise ValueError(
                f"{type(self).__name__}.quantize_impl: it returned a {type(result).__name__} without {lacking[0]} "
                "data, which a product reads; make each direction whose usage is True (rowwise_usage, "
                "columnwise_usage)."
            )
        return result._native()

    def _details(self) -> dict[str, object]:
        """Fields of its tensors that are not parts."""
        return {"_quantizer": self}

    def _of_native(self, native: "_C.Quantized", shape: Sequence[int], dtype: torch.dtype) -> QuantizedTensorStorage:
        result = self._from_parts(self.storage_class._parts_of(native, shape), shape, dtype)
        if not result._parts.keys() - result._tensors().keys():
            result.__dict__["_handle"] = native
        return result

    def _from_parts(
        self,
        parts: dict[str, torch.Tensor | None],
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> QuantizedTensorStorage:
        """The storage, or the tensor, with these parts."""
        fields = {part.argument: parts.get(name) for name, part in self.storage_class._parts.items()}
        details = self._details()
        fields |= {argument: details[name] for name, argument in self.storage_class._details.items()}
        if self.internal:
            return self.storage_class(**fields, fake_dtype=dtype)
        return self.tensor_class(shape=torch.Size(shape), dtype=dtype, requires_grad=requires_grad, **fields)

    # ---- tensors without values, many tensors ----

    def _wanted_specs(self, shape: Sequence[int]) -> dict[str, PartSpec]:
        """The parts of a tensor of `shape` in the directions of the usages."""
        self._must_want_something()
        specs = self.storage_class._specs(tuple(shape), self._details())
        wanted = {ROWWISE: self.rowwise_usage, COLUMNWISE: self.columnwise_usage}
        usages = [kind for kind in DATA if wanted[kind]]
        return {n: s for n, s in specs.items() if any(s.kind.startswith(d) for d in usages) or s.kind == "scale"}

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensorStorage:
        """A tensor with uninitialised values. device: by default CUDA if there is one."""
        parts = self._empty_parts(tuple(shape), dtype, resolve_device(device), pin_memory)
        return self._from_parts(parts, shape, dtype, requires_grad)

    def _empty_parts(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> dict[str, Any]:
        """The parts of a tensor of `shape`, uninitialised."""
        specs = self._wanted_specs(shape)
        return {name: layout.empty_part(spec, device, pin_memory) for name, spec in specs.items()}

    def multi_quantize(self, tensors: Sequence[torch.Tensor]) -> list[QuantizedTensorStorage]:
        """Each of `tensors`, quantized, with all parts of all of them in one buffer: one allocation. Each part is a
        typed view of it (get_rowwise_subview_info gives the place). If the quantizer records an amax, each tensor's own
        is in the buffer too. No gradient."""
        return packing.quantize_into_one_buffer(tensors, [self] * len(tensors))

    # ---- questions and settings ----

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Sets the directions of the next tensors; None: unchanged."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Records tensor's range if the format keeps one between steps."""

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Every shape is accepted; integers and doubles are not."""
        return inp.dtype in FLOATS

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether a gathered tensor derives its columnwise data from its rowwise data, so that only those are sent."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same values again later gives the same bits: not if a state between steps has
        changed."""
        return False

    @classmethod
    def _made_for(cls, wanted: Wanted) -> "Quantizer":
        """The quantizer for a recipe that names one of its _scalings."""
        raise NotImplementedError(f"{cls.__name__}: it does not define how recipes make it (_made_for).")

    def _get_compatible_recipe(self) -> type | None:
        """The recipe under which modules use this quantizer."""
        return None

    def inner_tensor_specs(
        self, shape: Sequence[int], *, device: torch.device | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{field: (shape, dtype)} of the parts of a tensor of `shape`, for a custom op's Meta function."""
        return {name: (spec.shape, spec.dtype) for name, spec in self._wanted_specs(shape).items()}

    def storage_metadata(self, dtype: torch.dtype) -> dict[str, object]:
        """The arguments of __tensor_unflatten__ besides those parts."""
        return flattening.context(self._details(), dtype)

    def onnx_quantize(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        raise refusal(f"{type(self).__name__}.onnx_quantize", "ONNX export is")

    def onnx_dequantize(self, tensor: QuantizedTensorStorage) -> torch.Tensor:
        raise refusal(f"{type(self).__name__}.onnx_dequantize", "ONNX export is")

    def _by_ranges(self) -> bool:
        """Whether parts of a tensor can be quantized separately, after the amaxes of the tensor are known."""
        return False

    def _range_state(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """The arguments 'scale' and 'amax' of functional.quantize_range_cast for a part of a tensor on `device`."""
        return {}

    def _fit_range(self, amaxes: torch.Tensor) -> None:
        """Runs before the parts of a tensor with these amaxes are cast."""

    def _recording(self, amax: torch.Tensor) -> "Quantizer | None":
        """A copy that writes a tensor's amax to `amax`; None if the format has none."""
        return None

    def _take_note_of(self, amax: torch.Tensor) -> None:
        """Records a tensor's amax that a quantizer of _recording found."""

    def _held(self, values: torch.Tensor) -> QuantizedTensorStorage:
        """A tensor that holds `values` from now on."""
        return self(values.detach())

    def _values_to_come(self) -> None:
        """Called before its tensor is filled with values unrelated to its present ones."""

    def _took(self, tensor: QuantizedTensorStorage) -> None:
        """Called after its tensor has taken data that another quantizer made."""

    def _adopted(self, tensor: QuantizedTensorStorage) -> None:
        """Called when it becomes tensor's quantizer."""
