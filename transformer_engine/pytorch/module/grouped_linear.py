"""GroupedLinear: a linear layer for each group of rows, such as the experts of a mixture. It sorts and sends
nothing."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C, functional
from transformer_engine.pytorch._internal.absent import absent
from transformer_engine.pytorch._internal.arguments import check_function, check_size, check_tensor
from transformer_engine.pytorch._internal.compiling import refuse as refuse_recipe
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch._internal.torch_autocast import is_autocast
from transformer_engine.pytorch.functional.linear import TracedGradAccumulator
from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule, default_init, refuse
from transformer_engine.pytorch.module.config import ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.error_context import raise_for_module
from transformer_engine.pytorch.module.group_splits import Splits, check_buffer, splits_of
from transformer_engine.pytorch.module.kept_input import keeps_input
from transformer_engine.pytorch.module.parallel import divided, group_size
from transformer_engine.pytorch.quantization.checkpoint import te_state
from transformer_engine.pytorch.quantization.module.primary_weights import plain
from transformer_engine.pytorch.quantization.state.autocast_state import THREAD, current_state
from transformer_engine.pytorch.tensor import QuantizedTensor


class GroupedCall(NamedTuple):
    """A module's arguments of functional.grouped_linear, by its names."""

    weights: list[torch.Tensor] | torch.Tensor
    biases: list[torch.Tensor]
    grad_accumulator: _C.GradAccumulator | TracedGradAccumulator | None
    quantizations: list
    own_weights: list[_C.Quantized]


_PLAIN = (bool, int, float, str, tuple, type(None))  # marks of clients on parameters: no tensors, no functions


class GroupedLinear(TransformerEngineBaseModule):
    """y[rows of g] = x[rows of g] weight{g}^T + bias{g} for consecutive groups of rows. Parameters `weight0`,
    `weight1`, ..., `bias0`, ...: rows of one buffer, until a client moves them.

    Shapes: inp [rows, in_features] -> [rows, out_features]. m_splits: the number of rows of each group. A list, or a
    CPU tensor with CUDA input, is known to the host and adds up to all rows; each group's products equal Linear's bit
    for bit. An int32 or int64 tensor on inp's device stays on the device, and the host never waits for it; a negative
    number counts as 0, rows beyond inp's are cut (te.verdict.split_verdict() counts both), rows of no group give zeros.

    return_bias, fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input: as Linear's; return_bias returns a
    list. Under te.autocast each group is quantized by itself, with scales, amaxes and a history of its own.
    parallel_mode and tp_size shape the parameters; nothing is communicated. use_grouped_tensor changes nothing.
    """

    _role_kind = "grouped_linear"

    @check_keywords()
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | int | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        op = type(self).__name__
        check_size(op, "num_gemms", num_gemms, 1)
        self._products = tuple(str(i) for i in range(num_gemms))  # before the base class counts them
        super().__init__()
        refuse(op, "overlap with communication", ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag)
        _refuse_single(op, single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias)
        check_size(op, "in_features", in_features)
        check_size(op, "out_features", out_features)
        check_function(op, "init_method", init_method)
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"{op}: argument 'parallel_mode' is {parallel_mode!r}, wanted None, 'column' or 'row'.")
        self.tp_size = group_size(op, tp_group, tp_size)
        self.tp_group = tp_group
        if self.tp_size > 1 and bias:
            raise ValueError(
                f"{op}: argument 'bias' is True with {self.tp_size} ranks of tensor parallelism: the sum over ranks "
                "would contain it once a rank; build the module with bias=False."
            )
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.parallel_mode = parallel_mode
        parameters = ParameterConfig(
            name=name,
            params_dtype=params_dtype,
            device=device,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        products = ProductConfig(
            delay_wgrad_compute=delay_wgrad_compute,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            bias=bias,
            return_bias=return_bias,
        )
        self._setup_linear(parameters, products, ("",))
        self.num_gemms = num_gemms
        self.in_features = divided(op, "in_features", in_features, self.tp_size if parallel_mode == "row" else 1)
        self.out_features = divided(op, "out_features", out_features, self.tp_size if parallel_mode == "column" else 1)
        self.save_original_input = save_original_input
        self.ub_name = ub_name
        self.single_grouped_weight = self.single_grouped_bias = False
        self._declare_groups(init_method or default_init)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def _declare_groups(self, init_method: InitMethod) -> None:
        groups, rows, row = self.num_gemms, self.out_features, self.parallel_mode == "row"
        marks = {"partition_stride": 1, **self._product_tags()}
        self._declare_rows(
            {f"weight{i}": rows for i in range(groups)},
            (groups * rows, self.in_features),
            init_method,
            tensor_model_parallel=True,
            partition_dim=int(row),
            **marks,
        )
        if self.use_bias:
            column = self.parallel_mode == "column"
            self._declare_rows(
                {f"bias{i}": rows for i in range(groups)},
                (groups * rows,),
                torch.nn.init.zeros_,
                tensor_model_parallel=column,
                partition_dim=0 if column else -1,
                **marks,
                **({"sequence_parallel": self.sequence_parallel} if row else {}),
            )
        self._order_parameters()

    def _order_parameters(self) -> None:
        """weight0, bias0, weight1, ...: the states of an optimizer have this order. In memory all weights come first,
        then all biases."""
        for name in [f"{kind}{i}" for i in range(self.num_gemms) for kind in ("weight", "bias")]:
            if name in self._parameters:
                self._parameters[name] = self._parameters.pop(name)

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        """The names of one group, or of all groups ("")."""
        if product:
            return [f"weight{product}"], [f"bias{product}"] if self.use_bias else []
        names = _names if torch.compiler.is_compiling() else _kept_names  # Dynamo warns of a cache
        return list(names("weight", self._products)), list(names("bias", self._products)) if self.use_bias else []

    def _unit_names(self) -> list[list[str]]:
        return list(self._product_names(""))

    def _settle(self, before) -> None:
        super()._settle(before)
        for i in () if self.use_bias else self._products:  # clients read the attribute
            weight = getattr(self, f"weight{i}")
            self.__dict__[f"bias{i}"] = torch.empty(0, dtype=weight.dtype, device=weight.device)

    # ---- calls ----

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor] | None]:
        """is_first_microbatch: as Linear's. out, dgrad_out: contiguous matrices that the output and inp's gradient are
        written into, with their shape and dtype and without requires_grad; rows of no group keep their values. inp's
        gradient is then that memory, also in .grad: a later backward that writes there overwrites it, so calls whose
        gradients are added up (of one inp, or without zero_grad() between) each need memory of their own.
        Errors: ValueError for splits that do not add up, or of another length, dtype or device, and for buffers that do
        not fit; TypeError for FP8 input. The module is unchanged then."""
        op = type(self).__name__
        if type(inp) is not torch.Tensor:
            check_tensor(op, "inp", inp)
            if isinstance(inp, QuantizedTensor):
                raise TypeError(
                    f"{op}: argument 'inp' is a {type(inp).__name__}, wanted a plain tensor, because each group is "
                    "quantized by itself; dequantize() it."
                )
            inp = plain(inp)
        splits = splits_of(op, m_splits, inp, self.num_gemms)
        for name, buffer, width in (("out", out, self.out_features), ("dgrad_out", dgrad_out, self.in_features)):
            if buffer is not None and not torch.compiler.is_compiling():  # the traced form refuses buffers
                check_buffer(op, name, buffer, inp, width, self._result_dtype(inp))
        call = self.call_of(inp, splits, is_first_microbatch)
        try:
            result = functional.grouped_linear(
                inp,
                call.weights,
                call.biases if self.apply_bias else (),
                splits=splits.host,
                offsets=splits.offsets,
                grad_accumulator=call.grad_accumulator,
                quantizations=call.quantizations,
                own_weights=call.own_weights,
                keep_input=keeps_input(self, len(call.quantizations) > 0),
                out=out,
                dgrad_out=dgrad_out,
            )
        except ValueError as error:
            name = self._product_names("")[0][0]
            raise_for_module(error, op, inp, self.in_features, name, call.weights[0])
            raise
        if call.quantizations:
            self.runtime.quantization.follow(result)
        elif self.runtime.quantization.fp8_calibration:
            self._calibrate_groups(inp, call.weights, splits)
        return (result, call.biases or None) if self.return_bias else result

    def call_of(self, inp: torch.Tensor, splits: Splits, is_first_microbatch: bool | None) -> GroupedCall:
        """The arguments of a call besides its rows. If they have quantizations, quantization.follow(output) comes
        after the call."""
        if splits.offsets is not None and inp.is_cuda and current_state().enabled:  # before a quantizer writes an amax
            self._check_dtype(inp)
        names, bias_names = self._product_names("")
        weights, all_plain = self._parameters_of(names)
        biases = self._parameters_of(bias_names)[0] if bias_names else []
        quantizations, own_weights = self._quantized_groups(weights, all_plain, is_first_microbatch)
        if not quantizations and not all_plain:
            weights = [weight if type(weight) is torch.nn.Parameter else plain(weight) for weight in weights]
        grad_accumulator = self.runtime.grad_accumulator(self, "", is_first_microbatch)
        return GroupedCall(weights, biases, grad_accumulator, quantizations, own_weights)

    def _parameters_of(self, names: list[str]) -> tuple[list[torch.Tensor], bool]:
        """The parameters, and whether all are plain: no subclass, and none that a parametrization computes."""
        if not torch.compiler.is_compiling():
            found = _C.registered_parameters(self._parameters, names, torch.nn.Parameter)
            if found is not None:  # there may be hundreds, and a module's __getattr__ is slow
                return found, True
        return [getattr(self, name) for name in names], False

    def _matrices(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weight of each group, of the parameters."""
        return weights

    def _result_dtype(self, inp: torch.Tensor) -> torch.dtype:
        return torch.get_autocast_dtype(inp.device.type) if is_autocast(inp) else inp.dtype

    def _quantized_groups(
        self, weights: list[torch.Tensor], all_plain: bool, is_first_microbatch: bool | None
    ) -> tuple[list, list[_C.Quantized]]:
        """The quantization of each group (one for all if they are the same), and the weights' FP8 copies; both empty in
        high precision."""
        self._check_recipe()
        quantization = self.runtime.quantization
        if torch.compiler.is_compiling():
            return quantization.of_call(self, "0", weights[0], is_first_microbatch)[0] or [], []
        quantizations = quantization.of_products(self)
        if not quantizations:
            return [], []
        own = quantization.own
        if is_first_microbatch is None and all_plain and not THREAD.state.in_capture():
            return quantizations, []  # of_weights() would return None for each
        kept = quantization.kept_of_all(self, weights[0], is_first_microbatch) if all_plain else None
        if kept is not None:
            return quantizations, kept
        weights = self._matrices(weights)
        copies = quantization.of_weights(self, weights, is_first_microbatch)
        if not any(result is not None for result in copies):
            return quantizations, []
        due = {product: i for i, product in enumerate(self._products) if copies[i] is None}
        if due:  # some weights are held in FP8: the others are quantized like them
            results = quantization.weights.copies_of(self, own, due, [weights[i] for i in due.values()], True, None)
            for i, result in zip(due.values(), results, strict=True):
                copies[i] = result
        if any(result is None for result in copies):
            raise NotImplementedError(
                f"{type(self).__name__}: a recipe that quantizes the weights of some groups and not of others, with "
                "weights that are kept over microbatches or held in FP8 alone, is not available in this version; let "
                "its factory quantize all or none of them, or leave is_first_microbatch at None."
            )
        return quantizations, copies

    def _check_dtype(self, inp: torch.Tensor) -> None:
        if self._result_dtype(inp) is torch.float32:
            refuse_recipe(
                f"{type(self).__name__}: argument 'inp' is float32, but groups whose sizes are on the GPU are "
                "multiplied in bfloat16 or float16; pass one of these, or 'm_splits' as a list of integers."
            )

    def _check_recipe(self) -> None:
        if self.tp_size > 1 and current_state().enabled and current_state().chosen_recipe().float8_current_scaling():
            refuse_recipe(
                f"{type(self).__name__}: Float8CurrentScaling with {self.tp_size} ranks of tensor parallelism: one "
                "scale for a whole tensor would need a reduction over the ranks, which this module does not do; use "
                "Float8BlockScaling or DelayedScaling.",
                ValueError,
            )

    def _calibrate_groups(self, inp: torch.Tensor, weights: list[torch.Tensor], splits: Splits) -> None:
        for index, (rows, weight) in enumerate(zip(splits.parts(inp), weights, strict=True)):
            self.runtime.quantization.calibrate(index, rows, weight)

    def backward_dw(self) -> None:
        """As the base class's, but returns if no gradient waits: a call without tokens may leave none."""
        if any(store.oldest() is not None for store in self.runtime.stores.values()):
            super().backward_dw()

    # ---- parameters, checkpoints ----

    @contextmanager
    def _marks_kept(self) -> Iterator[None]:
        """Attributes that clients set on parameters survive code that replaces the parameters."""
        marks = _marks_of(self)
        yield
        _mark(self, marks)

    def _apply(self, fn, recurse=True):
        with self._marks_kept():
            return super()._apply(fn, recurse)

    def _initialize(self) -> None:
        with self._marks_kept():
            super()._initialize()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_client_marks": _marks_of(self)}

    def __setstate__(self, state) -> None:
        marks = state.pop("_client_marks", {})
        super().__setstate__(state)
        self._order_parameters()  # in files of 2.20.0 all weights come first
        _mark(self, marks)

    def get_extra_state(self) -> torch.Tensor:
        """uint8. Under delayed scaling the pickle of a dict, which clients cut into one for each group: recipe,
        extra_fp8_variables, scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd. Otherwise empty."""
        if super().get_extra_state().numel() == 0:
            return torch.empty(0, dtype=torch.uint8)
        return te_state.pack(self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"], self.num_gemms)

    def _unstacked(self, state_dict: Mapping[str, object], prefix: str) -> dict[str, object]:
        """The entries of a checkpoint for this module, with one tensor `weight` (`bias`) for all groups taken apart."""
        found = dict(state_dict)
        for kind, shape in (("weight", (self.out_features, self.in_features)), ("bias", (self.out_features,))):
            stacked = found.get(prefix + kind)
            names = [f"{prefix}{kind}{i}" for i in self._products]
            shapes = (self.num_gemms, *shape), (self.num_gemms * shape[0], *shape[1:])
            fits = isinstance(stacked, torch.Tensor) and stacked.shape in shapes
            if not fits or any(name in found for name in names):
                continue
            del found[prefix + kind]
            found.update(zip(names, stacked.view(shapes[0]).unbind(0), strict=True))
        return found

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        state_dict = self._unstacked(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )


def _names(kind: str, products: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{kind}{i}" for i in products)


_kept_names = functools.cache(_names)


def _refuse_single(op: str, **requested: bool) -> None:
    """One parameter for all groups, by an argument or an environment variable, is refused."""
    for argument, value in requested.items():
        if not value:
            continue
        if os.environ.get("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "0") == "1":
            refuse(op, "one parameter for all groups", **{argument: value})
        warnings.warn(
            f"{op}: argument '{argument}' is {value!r} without NVTE_GROUPED_LINEAR_SINGLE_PARAM=1, and counts as "
            "False: the module has one parameter for each group.",
            stacklevel=4,
        )


def _marks_of(module: torch.nn.Module) -> dict[str, dict[str, object]]:
    """Marks of clients, also those that the module makes with other values."""
    return {
        name: {k: v for k, v in vars(p).items() if type(v) in _PLAIN and _is_clients(k, v, module._tags.get(name, {}))}
        for name, p in module._parameters.items()
        if p is not None and not isinstance(p, QuantizedTensor)
    }


def _is_clients(key: str, value: object, tags: Mapping[str, object]) -> bool:
    return key not in tags or (key != "row_unit" and value != tags[key])


def _mark(module: torch.nn.Module, marks: Mapping[str, Mapping[str, object]]) -> None:
    for name, values in marks.items():
        parameter = module._parameters.get(name)
        for key, value in values.items() if parameter is not None else ():
            setattr(parameter, key, value)


@absent("the autograd function behind GroupedLinear, called directly, is", "call the module")
class _GroupedLinear(torch.autograd.Function):
    """A name that clients import."""

    @staticmethod
    @absent("the autograd function behind GroupedLinear, called directly, is", "call the module")
    def forward(ctx: object, *args: object) -> None: ...


def is_module_grouped_tensor_path_supported(recipe: object, dtype: torch.dtype) -> bool:
    """Whether a module takes and returns grouped tensors: not in this version."""
    return False
