"""LayerNormLinear: a norm and the linear layer behind it as one autograd node."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._arguments import check_tensor
from transformer_engine.pytorch._keywords import tells_keywords
from transformer_engine.pytorch.module.base import InitMethod, refuse
from transformer_engine.pytorch.module.linear import ParametersSplit, SplitWeights
from transformer_engine.pytorch.module.norm_parameters import NormParameters
from transformer_engine.pytorch.module.retelling import retell


class LayerNormLinear(NormParameters, SplitWeights):
    """y = norm(x) weight^T + bias, norm being LayerNorm or RMSNorm over in_features.

    Parameters `layer_norm_weight`, `layer_norm_bias` (LayerNorm alone), and those of Linear. Returns y, then the bias
    with return_bias, then the norm's output with return_layernorm_output; where sequence_parallel divides the tokens,
    with return_layernorm_output_gathered that of all ranks, whose gradients are added up. fuse_wgrad_accumulation and
    delay_wgrad_compute as in Linear. recompute_norm_output (ours beyond the common API): the norm's output is not kept
    for backward, which computes it again from the norm's input, to the same bits.
    """

    @tells_keywords()
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
        self._setup_parallel(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            tp_recompute_allgather=tp_recompute_allgather,
            tp_overlap=tp_overlap,
            symmetric_ar_type=symmetric_ar_type,
            parallel_mode=parallel_mode,
        )
        self._setup(params_dtype=params_dtype, device=device, get_rng_state_tracker=get_rng_state_tracker, name=name)
        self._setup_wgrad("", fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute)
        self.recompute_norm_output = recompute_norm_output
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.ub_name = ub_name
        self._declare_norm(
            "LayerNormLinear",
            in_features,
            "in_features",
            normalization=normalization,
            eps=eps,
            zero_centered=zero_centered_gamma,
        )
        self._declare_linear(parameters_split, bias=bias, init_method=init_method)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        return_input: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """is_first_microbatch and fp8_output as Linear's. return_input (ours beyond the common API): inp is returned
        last as well; a residual branch that goes on from it has its gradient added inside the norm's backward."""
        refuse("LayerNormLinear", "a gradient that is a quantized tensor", fp8_grad=fp8_grad)
        if type(inp) is not torch.Tensor:
            check_tensor("LayerNormLinear", "inp", inp)
            inp = self._plain(inp)
        weight, bias = self._joined(self.weight_names), self._joined(self.bias_names)
        quantization, own_weight = self._quantized_product("", weight, is_first_microbatch)
        if quantization is None:
            weight = self._plain(weight)
        try:
            out, norm_output, h = functional.normalization_linear(
                inp,
                self.layer_norm_weight,
                self.layer_norm_bias,
                weight,
                bias if self.apply_bias else None,
                **self._norm_options(),
                return_output=self.return_layernorm_output or (quantization is None and self.fp8_calibration),
                recompute_output=self.recompute_norm_output,
                return_input=return_input,
                sink=self._sink("", is_first_microbatch),
                quantization=quantization,
                own_weight=own_weight,
                exchange=None if self.tp_size == 1 else self._exchange(self.parallel_mode, inp),
            )
        except ValueError as error:
            retell(error, "LayerNormLinear", inp, self.in_features, self.weight_names[0], weight)
            raise
        if quantization is not None:
            self._follow(out)
            out = self._quantized_output(out) if fp8_output else out
        elif self.fp8_calibration:
            self._calibrate("", norm_output, weight)
        results = [out]
        if self.return_bias:
            results.append(bias)
        if self.return_layernorm_output:
            gathers = self.return_layernorm_output_gathered and self.parallel_mode is not None
            results.append(self._gathered(norm_output) if gathers else norm_output)
        if return_input:
            results.append(h)
        return tuple(results) if len(results) > 1 else out

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}"
        )
