"""LayerNormLinear: a norm and a linear layer as one autograd node. csrc/layer/save_rules.cpp decides what it saves."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch.functional.linear import ProductCall
from transformer_engine.pytorch.module.base import InitMethod
from transformer_engine.pytorch.module.config import NormConfig, ParallelConfig, ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.linear_family import LinearFamily, ParametersSplit
from transformer_engine.pytorch.module.norm_parameters import declare_norm, norm_options


class LayerNormLinear(LinearFamily):
    """y = norm(x) weight^T + bias, norm being LayerNorm or RMSNorm over in_features.

    Parameters `layer_norm_weight`, `layer_norm_bias` (LayerNorm alone), and those of Linear. Returns y, then the bias
    with return_bias, then the norm's output with return_layernorm_output. If sequence_parallel divides the tokens,
    return_layernorm_output_gathered returns the norm's output of all ranks, whose gradients are added up.
    fuse_wgrad_accumulation and delay_wgrad_compute as in Linear. recompute_norm_output (an extension of the common
    API): the norm's output is not saved, and the backward recomputes it from the norm's input, to the same bits.
    """

    _op = "LayerNormLinear"

    @check_keywords()
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: ParametersSplit = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        recompute_norm_output: bool = False,
        tp_recompute_allgather: bool = True,
        tp_overlap: str = "auto",
    ) -> None:
        super().__init__()
        if parallel_mode == "row":
            raise NotImplementedError(
                "LayerNormLinear: argument 'parallel_mode' is 'row', but a norm of rows that are divided over ranks is "
                "not available in this version; use 'column', or a norm and a Linear."
            )
        self.recompute_norm_output = recompute_norm_output
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._build(
            products=ProductConfig(
                bias=bias,
                return_bias=return_bias,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
            ),
            parallel=ParallelConfig(
                parallel_mode=parallel_mode,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                tp_size=tp_size,
                tp_overlap=tp_overlap,
                tp_recompute_allgather=tp_recompute_allgather,
                symmetric_ar_type=symmetric_ar_type,
            ),
            parameters=ParameterConfig(
                params_dtype=params_dtype, device=device, get_rng_state_tracker=get_rng_state_tracker, name=name
            ),
        )
        self.in_features, self.out_features, self.ub_name = in_features, out_features, ub_name
        norm = NormConfig(normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma)
        declare_norm(self, norm, hidden=in_features, hidden_name="in_features")
        self._declare_one(parameters_split, init_method)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        return_input: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """is_first_microbatch and fp8_output as Linear's. return_input (an extension of the common API): inp is
        returned last as well; the gradient of a residual branch that reads it is added inside the norm's backward."""
        out, bias, norm_output, h = self._call_one(
            inp, is_first_microbatch, fp8_output, fp8_grad, return_input=return_input
        )
        return self._results(out, bias, norm_output, h if return_input else None)

    def _compute(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: ProductCall,
        return_input: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        calibrating = call["quantization"] is None and self.runtime.quantization.fp8_calibration
        return functional.normalization_linear(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            weight,
            bias,
            **norm_options(self),
            return_output=self.return_layernorm_output or calibrating,
            recompute_output=self.recompute_norm_output,
            return_input=return_input,
            **call,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}"
        )
