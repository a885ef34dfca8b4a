"""Linear: a drop-in for torch.nn.Linear on the fused core."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch.functional.linear import ProductCall
from transformer_engine.pytorch.module.base import InitMethod
from transformer_engine.pytorch.module.config import ParallelConfig, ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.kept_input import keeps_input
from transformer_engine.pytorch.module.linear_family import LinearFamily, ParametersSplit


class Linear(LinearFamily):
    """y = x weight^T + bias. Parameters `weight`, `bias`, or `<split>_weight`, `<split>_bias` with parameters_split.

    With return_bias the bias is not added but returned: (y, bias). Shapes: x [..., in_features] -> [..., out_features].
    fuse_wgrad_accumulation: the product adds the weight's gradient to weight.main_grad, and .grad stays None (or a
    dummy, if the weight has grad_added_to_main_grad). delay_wgrad_compute: the gradient waits for backward_dw().
    Under te.autocast the three products read operands that the recipe quantizes. save_original_input: the input is
    saved unquantized (useful if another user saves it anyhow); not under delayed scaling, nor with
    backward_override="dequantized".

    parallel_mode "column" or "row": the weight's rows or columns are divided over tp_group (or tp_size ranks, with
    set_tensor_parallel_group() before the first forward); arguments are global sizes. With sequence_parallel dimension
    0 is divided as well: a column layer gathers it, a row layer adds up its results and scatters them. Without it, a
    row layer's result and a column layer's input gradient are added up. tp_recompute_allgather (an extension, like
    tp_overlap): the rows that a column layer gathered are not saved, and the backward gathers them again, to the same
    bits. tp_overlap: "auto", "off" or "chunked" (the GEMM runs in chunks of rows while other rows are in transfer
    between ranks of one machine). ub_* are accepted and mean "auto". The gradient of a row layer's bias covers this
    rank's tokens, and the bias is marked `sequence_parallel`.
    """

    _op = "Linear"

    @check_keywords()
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
        self.save_original_input = save_original_input
        self._build(
            ParallelConfig(
                tp_group=tp_group,
                tp_size=tp_size,
                sequence_parallel=sequence_parallel,
                parallel_mode=parallel_mode,
                tp_overlap=tp_overlap,
                tp_recompute_allgather=tp_recompute_allgather,
                symmetric_ar_type=symmetric_ar_type,
            ),
            ParameterConfig(
                params_dtype=params_dtype,
                device=device,
                get_rng_state_tracker=get_rng_state_tracker,
                rng_tracker_name=rng_tracker_name,
                name=name,
            ),
            ProductConfig(
                bias=bias,
                return_bias=return_bias,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
            ),
        )
        self.in_features, self.out_features, self.ub_name = in_features, out_features, ub_name
        self._declare_one(parameters_split, init_method)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """is_first_microbatch: with fuse_wgrad_accumulation, True overwrites main_grad in this call's backward, False
        or None adds to it; under autocast True quantizes the weight and keeps it, False uses the kept copy.
        fp8_output: under autocast the output is a quantized tensor, and its gradient passes through unchanged."""
        out, bias, _, _ = self._call_one(inp, is_first_microbatch, fp8_output, fp8_grad)
        return (out, bias) if self.return_bias else out

    def _compute(
        self, inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: ProductCall
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        keep_input = keeps_input(self, call["quantization"] is not None)
        return functional.linear(inp, weight, bias, **call, keep_input=keep_input), inp, None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
