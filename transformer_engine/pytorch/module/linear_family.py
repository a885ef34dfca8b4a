"""The common part of Linear, LayerNormLinear and LayerNormMLP: options, weights and biases that may be several
parameters, division over ranks, and the call of a module with one product. functional/ computes."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_function, check_size, check_tensor
from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule, default_init, refuse
from transformer_engine.pytorch.module.config import ParallelConfig, ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.error_context import raise_for_module
from transformer_engine.pytorch.module.parallel import (
    check_options,
    check_ranks,
    divided,
    gathered,
    gathered_columns,
    group_by_name,
    group_size,
    keep_group,
)
from transformer_engine.pytorch.quantization.module.primary_weights import plain
from transformer_engine.pytorch.saved.marks import mark_not_offload
from transformer_engine.pytorch.saved.offload_scope import is_cpu_offload_enabled

ParametersSplit = Iterable[str] | Mapping[str, int] | None


def split_rows(op: str, parameters_split: ParametersSplit, rows: int) -> dict[str, int]:
    """Name prefix -> rows: {"": rows} without a split, equal parts for a list of names, or the sizes of a mapping."""
    if not parameters_split:
        return {"": rows}
    names = list(parameters_split)
    prefixes = [name.removesuffix("_") + "_" if isinstance(name, str) else None for name in names]
    if None in prefixes or len(set(prefixes)) < len(prefixes):
        raise ValueError(f"{op}: argument 'parameters_split' has the names {names!r}, wanted strings that differ.")
    if isinstance(parameters_split, Mapping):
        splits = dict(parameters_split)
        for name, size in splits.items():
            check_size(op, f"parameters_split[{name!r}]", size)
    else:
        if rows % len(names):
            raise ValueError(
                f"{op}: argument 'parameters_split' has {len(names)} names, which do not divide out_features {rows}; "
                "pass a dict of sizes."
            )
        splits = {name: rows // len(names) for name in names}
    if sum(splits.values()) != rows:
        raise ValueError(
            f"{op}: argument 'parameters_split' adds up to {sum(splits.values())} rows, wanted out_features {rows}."
        )
    return dict(zip(prefixes, splits.values(), strict=True))


class LinearFamily(TransformerEngineBaseModule):
    """A constructor passes its options to `_build` in groups (module/config.py).

    A weight or bias of a product may be several parameters, rows of one matrix. A bias that a module does not have is
    an empty tensor attribute, because clients read it (`_absent_names`)."""

    _op: str  # the module's name in errors, also for subclasses of clients
    _products = ("",)
    _absent_names: Sequence[str] = ()

    # ---- construction ----

    def _build(
        self,
        parallel: ParallelConfig,
        parameters: ParameterConfig,
        products: ProductConfig,
        prefixes: Sequence[str] = ("",),
    ) -> None:
        """Each constructor begins with it. prefixes: as _setup_linear's."""
        op, mode = type(self).__name__, parallel.parallel_mode
        if mode not in (None, "column", "row"):
            raise ValueError(f"{op}: argument 'parallel_mode' is {mode!r}, wanted None, 'column' or 'row'.")
        check_options(
            op,
            tp_overlap=parallel.tp_overlap,
            tp_recompute_allgather=parallel.tp_recompute_allgather,
            symmetric_ar_type=parallel.symmetric_ar_type,
            row=mode == "row",
        )
        self.tp_size = group_size(op, parallel.tp_group, parallel.tp_size)
        self.tp_group = parallel.tp_group
        self.sequence_parallel = self.tp_size > 1 and parallel.sequence_parallel
        self.parallel_mode = mode
        self.tp_recompute_allgather = parallel.tp_recompute_allgather
        self.tp_overlap = parallel.tp_overlap
        self.symmetric_ar_type = parallel.symmetric_ar_type
        self._setup_linear(parameters, products, prefixes)

    def _declare_one(self, parameters_split: ParametersSplit, init_method: InitMethod | None) -> None:
        """Declares and initialises the parameters of a module with one product."""
        op, parallel_mode = type(self).__name__, self.parallel_mode
        check_size(op, "in_features", self.in_features)
        check_size(op, "out_features", self.out_features)
        check_function(op, "init_method", init_method)
        splits = split_rows(op, parameters_split, self.out_features)
        if parallel_mode == "column":  # each part by itself, so that a rank has rows of each part
            named = {} if "" in splits else {name: f"parameters_split[{name.removesuffix('_')!r}]" for name in splits}
            splits = {
                name: divided(op, named.get(name, "out_features"), rows, self.tp_size) for name, rows in splits.items()
            }
            self.out_features = sum(splits.values())
        elif parallel_mode == "row":
            self.in_features = divided(op, "in_features", self.in_features, self.tp_size)
        self.weight_names = [prefix + "weight" for prefix in splits]
        names = [prefix + "bias" for prefix in splits]
        self.bias_names, self._absent_names = (names, []) if self.use_bias else ([], names)
        self._declare_product(splits, self.in_features, init_method, parallel_mode)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def _declare_product(
        self, splits: Mapping[str, int], columns: int, init_method: InitMethod | None, mode: str | None
    ) -> None:
        """splits: prefix of a weight and a bias -> its rows; mode: how the rows are divided."""
        rows = sum(splits.values())
        self._declare_rows(
            {prefix + "weight": part for prefix, part in splits.items()},
            (rows, columns),
            init_method or default_init,
            tensor_model_parallel=mode is not None,
            partition_dim={"column": 0, "row": 1, None: -1}[mode],
            partition_stride=1,
            **self._product_tags(),
        )
        if self.use_bias:
            on_row = {"sequence_parallel": self.sequence_parallel} if mode == "row" else {}
            self._declare_rows(
                {prefix + "bias": part for prefix, part in splits.items()},
                (rows,),
                torch.nn.init.zeros_,
                tensor_model_parallel=mode == "column",
                partition_dim=0 if mode == "column" else -1,
                partition_stride=1,
                **on_row,
                **self._product_tags(),
            )

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        return self.weight_names, self.bias_names

    def _settle(self, before) -> None:
        super()._settle(before)
        for name in self._absent_names:
            first = getattr(self, self.weight_names[0])
            placeholder = self.__dict__.get(name)
            if placeholder is None or (placeholder.dtype, placeholder.device) != (first.dtype, first.device):
                self.__dict__[name] = torch.empty(0, dtype=first.dtype, device=first.device)

    # ---- ranks ----

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Sets the group that the module communicates over if it is divided over ranks.

        Errors: ValueError for a group whose size differs from the one that the module was built for; it keeps its
        present group then. A module that is not divided accepts every group and communicates nothing over it."""
        if self.tp_size > 1 or any(self._modes()):
            check_ranks(type(self).__name__, tp_group, self.tp_size)
        self.tp_group = tp_group

    def _keep_group(self, group: object | None) -> None:
        """Nothing is communicated over the old group any more, however the new one was set."""
        keep_group(self, group)
        self.runtime.tp_comms = {}
        self.runtime.quantization.agree_over_group(self)

    tp_group = group_by_name.setter(_keep_group)

    def _modes(self) -> tuple[str | None, ...]:
        """The parallel mode of each product."""
        return (self.parallel_mode,)

    def _gathered_columns(self, forward: bool) -> tuple[str, list[int]] | None:
        return gathered_columns(self, forward)

    # ---- calls ----

    def _joined(self, names: list[str]) -> torch.Tensor | None:
        if len(names) == 1:
            found = self._parameters.get(names[0])  # Module.__getattr__ takes half a microsecond
            return getattr(self, names[0]) if found is None else found
        parts = [getattr(self, name) for name in names]
        if not parts:
            return None
        if is_cpu_offload_enabled():
            mark_not_offload(*parts)  # the joined view is neither a parameter nor a view that torch records
        return functional.noop_cat(parts, names)

    def _call_one(
        self, inp: torch.Tensor, is_first_microbatch: bool | None, fp8_output: bool, fp8_grad: bool, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """A call of a module with one product, which `_compute` runs: (output, bias, the product's operand, the norm's
        input)."""
        op, runtime = self._op, self.runtime
        if fp8_grad:
            refuse(op, "a gradient that is a quantized tensor", fp8_grad=fp8_grad)
        if type(inp) is not torch.Tensor:
            check_tensor(op, "inp", inp)
            inp = plain(inp)
        weight, bias = self._joined(self.weight_names), self._joined(self.bias_names)
        call = runtime.call(self, "", weight, inp, is_first_microbatch, self.parallel_mode)
        quantized = call["quantization"] is not None
        if not quantized:
            weight = plain(weight)
        try:
            out, operand, h = self._compute(inp, weight, bias if self.apply_bias else None, call, **options)
        except ValueError as error:
            raise_for_module(error, op, inp, self.in_features, self.weight_names[0], weight)
            raise
        if quantized:
            runtime.quantization.follow(out)
            out = runtime.quantization.of_output(self, out) if fp8_output else out
        elif runtime.quantization.fp8_calibration:
            runtime.quantization.calibrate(0, operand, weight)
        return out, bias, operand, h

    def _results(
        self, out: torch.Tensor, bias: torch.Tensor | None, norm_output: torch.Tensor, h: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """The results of a module with a norm. h: returned last if it is given."""
        results = [out]
        if self.return_bias:
            results.append(bias)
        if self.return_layernorm_output:
            gathers = self.return_layernorm_output_gathered and any(self._modes())
            results.append(gathered(self, norm_output) if gathers else norm_output)
        if h is not None:
            results.append(h)
        return tuple(results) if len(results) > 1 else out
