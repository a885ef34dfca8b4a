"""Linear: a drop-in for torch.nn.Linear on the fused core."""

from collections.abc import Callable, Iterable, Mapping

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._arguments import check_function, check_size, check_tensor
from transformer_engine.pytorch._keywords import tells_keywords
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled, mark_not_offload
from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule, default_init, refuse
from transformer_engine.pytorch.module.kept_input import keeps_input
from transformer_engine.pytorch.module.parallel import TensorParallel, divided
from transformer_engine.pytorch.module.retelling import retell

ParametersSplit = Iterable[str] | Mapping[str, int] | None


def split_rows(op: str, parameters_split: ParametersSplit, rows: int) -> dict[str, int]:
    """Name prefix -> rows: {"": rows} without a split, equal parts for a list of names, what a mapping says."""
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


class SplitWeights(TensorParallel, TransformerEngineBaseModule):
    """A module whose weight and bias may be several parameters, rows of one matrix. A bias that there is none of is an
    empty tensor beside the weight, for clients that read the attribute."""

    _products = ("",)

    def _declare_linear(
        self,
        parameters_split: ParametersSplit,
        *,
        bias: bool,
        init_method: InitMethod | None,
    ) -> None:
        op, parallel_mode = type(self).__name__, self.parallel_mode
        check_size(op, "in_features", self.in_features)
        check_size(op, "out_features", self.out_features)
        check_function(op, "init_method", init_method)
        splits = split_rows(op, parameters_split, self.out_features)
        parallel = parallel_mode is not None
        dim = 1 if parallel_mode == "row" else 0
        if parallel_mode == "column":  # each part by itself, so that a rank has rows of every one
            named = {} if "" in splits else {name: f"parameters_split[{name.removesuffix('_')!r}]" for name in splits}
            splits = {
                name: divided(op, named.get(name, "out_features"), rows, self.tp_size) for name, rows in splits.items()
            }
            self.out_features = sum(splits.values())
        elif parallel_mode == "row":
            self.in_features = divided(op, "in_features", self.in_features, self.tp_size)
        self.weight_names = [prefix + "weight" for prefix in splits]
        names = [prefix + "bias" for prefix in splits]
        self.bias_names, self._absent_names = (names, []) if bias else ([], names)
        rows = list(splits.values())
        self._declare_rows(
            dict(zip(self.weight_names, rows, strict=True)),
            (self.out_features, self.in_features),
            init_method or default_init,
            tensor_model_parallel=parallel,
            partition_dim=dim if parallel else -1,
            partition_stride=1,
            **self._product_tags(),
        )
        if bias:
            on_row = {"sequence_parallel": self.sequence_parallel} if parallel_mode == "row" else {}
            self._declare_rows(
                dict(zip(names, rows, strict=True)),
                (self.out_features,),
                torch.nn.init.zeros_,
                tensor_model_parallel=parallel_mode == "column",
                partition_dim=0 if parallel_mode == "column" else -1,
                partition_stride=1,
                **on_row,
                **self._product_tags(),
            )

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        return self.weight_names, self.bias_names

    def _settle(self, before) -> None:
        super()._settle(before)
        first = getattr(self, self.weight_names[0])
        for name in self._absent_names:
            there = self.__dict__.get(name)
            if there is None or (there.dtype, there.device) != (first.dtype, first.device):
                self.__dict__[name] = torch.empty(0, dtype=first.dtype, device=first.device)

    def _joined(self, names: list[str]) -> torch.Tensor | None:
        parts = [getattr(self, name) for name in names]
        if len(parts) < 2:
            return parts[0] if parts else None
        if is_cpu_offload_enabled():
            mark_not_offload(*parts)  # joined without a copy they are no parameter, nor a view of one that torch knows
        return functional.noop_cat(parts, names)


class Linear(SplitWeights):
    """y = x weight^T + bias. Parameters `weight`, `bias`, or `<split>_weight`, `<split>_bias` with parameters_split.

    With return_bias the bias is not added but returned: (y, bias). Shapes: x [..., in_features] -> [..., out_features].
    fuse_wgrad_accumulation: the weight's gradient is added into weight.main_grad by the product itself, and .grad stays
    None (or a dummy, where the weight has grad_added_to_main_grad). delay_wgrad_compute: it waits for backward_dw().
    Under te.autocast the three products are those of the recipe's quantized operands. save_original_input: the input is
    kept for backward unquantized (worth it where it is kept anyhow); not under delayed scaling, nor with
    backward_override="dequantized".

    parallel_mode "column" or "row": the weight's rows or columns are divided over tp_group (or tp_size ranks, with
    set_tensor_parallel_group() before the first forward); sizes passed are global. With sequence_parallel dimension 0
    is divided as well: a column gathers it, a row adds its results up and scatters it. Without, a row's result and a
    column's input gradient are added up. tp_recompute_allgather (ours, as tp_overlap): what a column has gathered is
    not kept for backward, which gathers it again, to the same bits. tp_overlap: "auto" or "off". ub_* are accepted and
    mean "auto". The gradient of a row's bias is that of the own tokens, and the bias marked `sequence_parallel`.
    """

    @tells_keywords()
    def __init__(
        self,
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
        parameters_split: ParametersSplit = None,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        tp_recompute_allgather: bool = True,
        tp_overlap: str = "auto",
    ) -> None:
        super().__init__()
        self._setup_parallel(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            tp_recompute_allgather=tp_recompute_allgather,
            tp_overlap=tp_overlap,
            symmetric_ar_type=symmetric_ar_type,
            parallel_mode=parallel_mode,
        )
        self._setup(
            params_dtype=params_dtype,
            device=device,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            name=name,
        )
        self._setup_wgrad("", fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.save_original_input = save_original_input
        self.ub_name = ub_name
        self._declare_linear(parameters_split, bias=bias, init_method=init_method)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """is_first_microbatch: with fuse_wgrad_accumulation, True overwrites main_grad in this call's backward, False
        or None adds to it; under autocast True quantizes the weight and keeps it, False takes what was kept.
        fp8_output: under autocast the output is a quantized tensor, its gradient passes through unchanged."""
        refuse("Linear", "a gradient that is a quantized tensor", fp8_grad=fp8_grad)
        if type(inp) is not torch.Tensor:
            check_tensor("Linear", "inp", inp)
            inp = self._plain(inp)
        weight, bias = self._joined(self.weight_names), self._joined(self.bias_names)
        quantization, own_weight = self._quantized_product("", weight, is_first_microbatch)
        if quantization is None:
            weight = self._plain(weight)
        try:
            out = functional.linear(
                inp,
                weight,
                bias if self.apply_bias else None,
                sink=self._sink("", is_first_microbatch),
                quantization=quantization,
                own_weight=own_weight,
                keep_input=keeps_input(self, quantization is not None),
                exchange=None if self.tp_size == 1 else self._exchange(self.parallel_mode, inp),
            )
        except ValueError as error:
            retell(error, "Linear", inp, self.in_features, self.weight_names[0], weight)
            raise
        if quantization is not None:
            self._follow(out)
            out = self._quantized_output(out) if fp8_output else out
        elif self.fp8_calibration:
            self._calibrate("", inp, weight)
        return (out, bias) if self.return_bias else out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
